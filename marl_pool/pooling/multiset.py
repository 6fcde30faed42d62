"""An image's patches as a multiset: the different ones, each with its count."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from marl_pool.tokens import Mask

WORD = 8
"""Bytes in an int64."""
GOLDEN = -7046029254386353131
"""2⁶⁴ over the golden ratio: an odd factor that spreads bits over a word."""


def unique_patches(features: Tensor, padding: Mask = None) -> tuple[Tensor, Tensor]:
    """Find the different patches of each image and count them.

    They come in the order of a hash, whatever the order of the image's patches was. A
    collision is rare, and lists a patch twice, with counts that add up.

    Args:
        features: ``(*B, N, F)`` uint8.
        padding: ``(*B, N)`` bool, True = ignore; None where nothing is padded.

    Returns:
        Patches ``(*B, K, F)`` uint8 and their counts ``(*B, K)`` int64, 0 in unused
        slots. K is the largest number of different patches in an image, at least 1.
    """
    *batch, num_tokens, width = features.shape
    words = _to_words(features.reshape(-1, num_tokens, width))
    hidden = None if padding is None else padding.reshape(-1, num_tokens)
    order, groups, size = _group_equal(words, hidden)
    # All patches of a group are equal, so any of them may represent it: scatter keeps
    # the one that it writes last. The extra column at the end collects padding.
    chosen = torch.zeros_like(order[:, :1]).repeat(1, size + 1)
    counts = chosen.scatter_add(1, groups, torch.ones_like(groups))[:, :size]
    chosen = chosen.scatter(1, groups, order)[:, :size]
    patches = _gather_rows(words, chosen).view(torch.uint8)[..., :width]
    return patches.reshape(*batch, size, width), counts.reshape(*batch, size)


def _group_equal(words: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return indices that sort patches by content, each sorted one's group, and K.

    Groups of equal patches are numbered from 0 to K - 1; padding has the number K.
    """
    # Sort by a hash of the content, so that equal patches are neighbors.
    labels = _hash(words)
    if hidden is not None:  # sort padding to the end
        labels = labels.masked_fill(hidden, torch.iinfo(torch.int64).max)
    order = labels.argsort(-1)
    ordered = _gather_rows(words, order)
    # A group starts where a patch differs from its predecessor.
    starts = torch.ones_like(order, dtype=torch.bool)
    starts[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).any(-1)
    if hidden is not None:
        hidden = hidden.gather(-1, order)
        starts[:, 1:] |= hidden[:, :-1]
        starts &= ~hidden
    # Number the groups from 0 on; padding gets the last number.
    groups = starts.cumsum(-1) - 1
    size = max(int(groups[:, -1].max()) + 1, 1)
    if hidden is not None:
        groups = groups.masked_fill(hidden, size)
    return order, groups, size


def _gather_rows(words: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``(B, N, W)`` at ``index (B, K)``, ``(B, K, W)``."""
    count, num_tokens, _ = words.shape
    first = num_tokens * torch.arange(count, device=words.device)
    flat = words.flatten(0, 1).index_select(0, (index + first[:, None]).flatten())
    return flat.unflatten(0, index.shape)


def _to_words(features: Tensor) -> Tensor:
    """View bytes ``(B, N, F)`` as int64 ``(B, N, W)``, filled up with zeros."""
    features = pad(features, (0, -features.shape[-1] % WORD)).contiguous()
    if features.storage_offset() % WORD:
        features = features.clone()
    return features.view(torch.int64)


def _hash(words: Tensor) -> Tensor:
    """Hash each patch, ``(B, N)`` int64."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, words.shape[-1:], generator=generator)
    mixed = words * (2 * factors.to(words.device) + 1)
    # A product's low bits do not depend on the factor's high bits: mix them in.
    mixed ^= mixed >> 32
    return (mixed * GOLDEN).sum(-1)
