"""Random numbers of a perturbation, from each environment's stream."""

import math

import torch
from torch import Tensor

from marl_pool.utils.randomness import uniform


def uniform_like(keys: Tensor, turn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sample ``(num_envs, *shape)`` float64 numbers in (0, 1) for one turn.

    ``keys`` of the random streams and ``turn``, int64, are ``(num_envs,)``; each turn
    has separate numbers.
    """
    size = torch.Size(shape).numel()
    return uniform(keys, size, turn[:, None] * size).view(len(keys), *shape)


def normal(numbers: Tensor) -> Tensor:
    """Transform float64 numbers, uniform in (0, 1), to float32 numbers of N(0, 1).

    Inverse transform sampling in float32, which is several times faster than in
    float64 and ends at 5.4 standard deviations.
    """
    # The function is infinite at ±1, to which a float32 may round.
    largest = 1 - torch.finfo(torch.float32).eps / 2
    centered = (2 * numbers - 1).float().clamp_(-largest, largest)
    return centered.erfinv_().mul_(math.sqrt(2))
