"""Random numbers of a perturbation, from each environment's stream."""

import math

import torch
from torch import Tensor

from marl_pool.utils.randomness import uniform

SEVERITY_POSITION = -1
"""Position of the severity in a perturbation's stream; other numbers begin at 0."""


def uniform_like(keys: Tensor, turn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sample ``(num_envs, *shape)`` float64 numbers in (0, 1) for one turn.

    ``keys`` of the random streams and ``turn``, int64, are ``(num_envs,)``; each turn
    has separate numbers.
    """
    size = torch.Size(shape).numel()
    return uniform(keys, size, turn[:, None] * size).view(len(keys), *shape)


def normal_like(keys: Tensor, turn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sample ``(num_envs, *shape)`` float32 numbers of N(0, 1); see `uniform_like`."""
    return normal(uniform_like(keys, turn, shape))


def normal(numbers: Tensor) -> Tensor:
    """Transform float64 numbers, uniform in (0, 1), to float32 numbers of N(0, 1).

    Inverse transform sampling in float32, which is several times faster than in
    float64 and ends at 5.4 standard deviations.
    """
    largest = 1 - torch.finfo(torch.float32).eps / 2
    centered = (2 * numbers - 1).float().clamp_(-largest, largest)
    return centered.erfinv_().mul_(math.sqrt(2))


def sample_severities(
    bounds: tuple[float, float],
    keys: Tensor,
    ramp: int | None = None,
    episodes: Tensor | None = None,
) -> Tensor:
    """Sample severities ``(num_envs,)`` float64, uniform between the bounds.

    An environment has the same severity alone and in a batch, and its other random
    numbers do not depend on the bounds.

    Args:
        bounds: low and high, in [0, 1].
        keys: ``(num_envs,)`` of the random streams.
        ramp: episodes over which the severity grows from 0 to the sampled one.
        episodes: ``(num_envs,)`` episodes played so far; None: the ramp is over.
    """
    low, high = bounds
    if low == high:
        sampled = torch.full(keys.shape, low, dtype=torch.float64, device=keys.device)
    else:
        sampled = low + (high - low) * uniform(keys, 1, SEVERITY_POSITION)[:, 0]
    if ramp is None or episodes is None:
        return sampled
    return sampled * (episodes.double() / ramp).clamp(max=1)
