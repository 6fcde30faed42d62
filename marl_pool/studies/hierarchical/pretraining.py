"""Teacher-forced pre-training: each merge is undone at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.encoders.pairs import gather_tokens
from marl_pool.studies.hierarchical.encoder import Chance
from marl_pool.studies.hierarchical.networks import ImageAutoencoder


class Forced(NamedTuple):
    """Measurements of teacher forcing.

    Attributes:
        losses: ``(B,)`` squared errors of tokens, the mean over layers, with that of
            the pixels read from tokens that never merged.
        score: ``(B,)`` each layer's log-probabilities times its own error, summed:
            REINFORCE for the merging policy.
        unmerging: ``(B,)`` cross-entropy of the tokens to take apart, summed.
        norm: ``(B,)`` squared norm of the tokens, summed over layers.
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
    """Merge layer by layer, and let the decoder undo each layer right away.

    The decoder is told which tokens to take apart; its own choice learns to name them.

    Source: Nair and Lieck, section 3.2.2. Where we differ: an error's target has no
    gradient and tokens go on to the next layer without one, or all tokens would be
    best off alike; and pixels are read from the tokens that have not merged, so that
    the layers between images and tokens learn as well.
    """
    tokens = network.patches(images)
    losses = (network.pixels(tokens) - images).square().mean((1, 2, 3))
    score = unmerging = norm = torch.zeros_like(losses)
    x = tokens
    for depth, count in enumerate(schedule, 1):
        step, pairs = network.encoder.step(x, depth, count, chance)
        size = step.tokens.shape[1]
        last = torch.arange(size - count, size, device=x.device)
        undone = network.decoder.step(
            step.tokens, depth, count, chance, last.expand(len(x), -1)
        )
        order = torch.cat([step.rest, pairs.gone, pairs.kept], 1)
        target = gather_tokens(x, order).detach()
        error = (undone.tokens - target).square().mean((1, 2))
        losses = losses + error / len(schedule)
        score = score + error.detach() * step.log_prob
        unmerging = unmerging - undone.log_prob
        norm = norm + step.norm + undone.norm
        x = step.tokens.detach()
    return Forced(losses, score, unmerging, norm)
