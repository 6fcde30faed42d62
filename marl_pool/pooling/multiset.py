"""The patches of a picture that differ, each with how many times it is there."""

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 8
"""Bytes in an int64."""
GOLDEN = -7046029254386353131
"""2⁶⁴ over the golden ratio: an odd factor that spreads bits over a word."""


def unique_patches(
    features: Tensor, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find the patches of each picture that differ.

    Their order is that of a hash, whatever the order of the picture's patches was. A
    collision is rare, and lists a patch twice, with counts that add up.

    Args:
        features: ``(*B, N, F)`` bytes.
        padding: ``(*B, N)`` bool, True = ignore; None where nothing is padded.

    Returns:
        Patches ``(*B, K, F)`` bytes, and how many times each is there, ``(*B, K)``
        int64. K is that of the picture with the most, at least 1; where a picture has
        fewer, the counts after them are 0.
    """
    *batch, num_tokens, width = features.shape
    words = _words(features.reshape(-1, num_tokens, width))
    hidden = None if padding is None else padding.reshape(-1, num_tokens)
    order, kinds, most = _sort(words, hidden)
    # Patches of a kind are alike: whichever of them is written last stands for it.
    chosen = torch.zeros_like(order[:, :1]).repeat(1, most + 1)
    counts = chosen.scatter_add(1, kinds, torch.ones_like(kinds))[:, :most]
    chosen = chosen.scatter(1, kinds, order)[:, :most]
    patches = _take(words, chosen).view(torch.uint8)[..., :width]
    return patches.reshape(*batch, most, width), counts.reshape(*batch, most)


def _sort(words: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Put equal patches beside each other.

    Returns:
        Which patch comes where, ``(B, N)``; of what kind it is there, ``(B, N)``, from
        0 to K - 1, and K for padding; K.
    """
    labels = _hash(words)
    if hidden is not None:  # last, not among others like them
        labels = labels.masked_fill(hidden, torch.iinfo(torch.int64).max)
    order = labels.argsort(-1)
    ordered = _take(words, order)
    new = torch.ones_like(order, dtype=torch.bool)
    new[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).any(-1)
    if hidden is not None:
        hidden = hidden.gather(-1, order)
        new[:, 1:] |= hidden[:, :-1]
        new &= ~hidden
    kinds = new.cumsum(-1) - 1
    most = max(int(kinds[:, -1].max()) + 1, 1)
    if hidden is not None:
        kinds = kinds.masked_fill(hidden, most)
    return order, kinds, most


def _take(words: Tensor, index: Tensor) -> Tensor:
    """The patches ``(B, K, W)`` at ``(B, K)``."""
    count, num_tokens, _ = words.shape
    first = num_tokens * torch.arange(count, device=words.device)
    flat = words.flatten(0, 1).index_select(0, (index + first[:, None]).flatten())
    return flat.unflatten(0, index.shape)


def _words(features: Tensor) -> Tensor:
    """Bytes ``(B, N, F)`` as int64 ``(B, N, W)``, the last ones filled with zeros."""
    short = -features.shape[-1] % WORD
    if short:
        features = pad(features, (0, short))
    features = features.contiguous()
    if features.storage_offset() % WORD:
        features = features.clone()
    return features.view(torch.int64)


def _hash(words: Tensor) -> Tensor:
    """A number for each patch, ``(B, N)``."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, words.shape[-1:], generator=generator)
    mixed = words * (2 * factors.to(words.device) + 1)
    # A product's low bits hear nothing of the word's high ones.
    mixed ^= mixed >> 32
    return (mixed * GOLDEN).sum(-1)
