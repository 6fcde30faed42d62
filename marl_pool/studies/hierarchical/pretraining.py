"""Teacher-forced pre-training: the decoder undoes each merge immediately."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.encoders.pairs import gather_tokens
from marl_pool.studies.hierarchical.encoder import Chance
from marl_pool.studies.hierarchical.networks import ImageAutoencoder


class Forced(NamedTuple):
    """Losses of teacher forcing.

    Attributes:
        losses: ``(B,)``, squared error of tokens, the mean over layers, plus that of
            the pixels read from unmerged tokens.
        score: ``(B,)``, sum over layers of log-probability times the layer's error, for
            REINFORCE on the merging policy.
        unmerging: ``(B,)``, cross-entropy of the tokens to unmerge, summed over layers.
        norm: ``(B,)``, squared norm of the tokens, summed over layers.
    """

    losses: Tensor
    score: Tensor
    unmerging: Tensor
    norm: Tensor


def teacher_forced(
    network: ImageAutoencoder,
    images: Tensor,
    schedule: Sequence[int],
    chance: Chance,
) -> Forced:
    """Merge layer by layer, and let the decoder undo each layer immediately.

    The decoder receives the tokens to unmerge, and learns to choose them.

    Source: Nair and Lieck, section 3.2.2. Differences: neither an error's target nor
    the tokens passed to the next layer have a gradient, otherwise equal tokens would
    minimise the error; and pixels are read from the unmerged tokens, so that the layers
    between images and tokens are trained as well.
    """
    # Read the pixels from the unmerged tokens.
    x = network.patches(images)
    losses = (network.pixels(x) - images).square().mean((1, 2, 3))
    score = unmerging = norm = torch.zeros_like(losses)
    for depth, count in enumerate(schedule, 1):
        # Merge, and unmerge the tokens that were merged, which are last.
        step = network.encoder.step(x, depth, count, chance)
        size = step.tokens.shape[1]
        last = torch.arange(size - count, size, device=x.device).expand(len(x), -1)
        undone = network.decoder.step(step.tokens, depth, count, chance, last)
        # Compare with the input tokens, in the decoder's order.
        assert step.pairs is not None
        order = torch.cat([step.rest, step.pairs.gone, step.pairs.kept], 1)
        target = gather_tokens(x, order).detach()
        error = (undone.tokens - target).square().mean((1, 2))
        # The layer's own error is the loss of its choices.
        losses = losses + error / len(schedule)
        score = score + error.detach() * step.log_prob
        unmerging = unmerging - undone.log_prob
        norm = norm + step.norm + undone.norm
        # Layers are trained one by one, without a gradient between them.
        x = step.tokens.detach()
    return Forced(losses, score, unmerging, norm)
