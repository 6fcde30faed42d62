"""Schedules of merges per layer, and random depths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl_pool.encoders.merging import pair_counts
from marl_pool.utils.errors import InputError


def merging_schedule(num_tokens: int, proportion: float, num_layers: int) -> list[int]:
    """Compute the merges of each layer, ``r = ⌊p T / 2⌋`` of the T tokens left.

    256 tokens become 91, 27 and 1 over 8 layers with p = 0.25, 0.5 and 1.

    Source: Nair and Lieck, Table 1.

    Args:
        num_tokens: T, tokens of the first layer.
        proportion: p, fraction of tokens that merge, in [0, 1].
        num_layers: L, number of layers.
    """
    schedule = []
    for _ in range(num_layers):
        schedule.append(int(pair_counts(proportion, torch.tensor(num_tokens))))
        num_tokens -= schedule[-1]
    return schedule


def validate_schedule(num_tokens: int, schedule: Sequence[int]) -> None:
    """Validate that each layer has enough tokens for its merges.

    Raises:
        InputError: no layer, or more merges than pairs.
    """
    if not schedule:
        raise InputError("task.schedule: expected a number for each layer, got []")
    for layer, count in enumerate(schedule, 1):
        if not 0 <= count <= num_tokens // 2:
            raise InputError(
                f"task.schedule: expected at most {num_tokens // 2} merges of the "
                f"{num_tokens} tokens that reach layer {layer}, got {count}"
            )
        num_tokens -= count


def depth_probabilities(
    rho: float, num_layers: int, *, proportional: bool = False
) -> Tensor:
    """Compute the probabilities of the depths 1 to L, ``(L,)`` float64.

    ``P(d) = ρ^(d-1) (1 - ρ)`` and ``P(L) = ρ^(L-1)``, where ρ is the probability of
    continuing to the next layer; or, if ``proportional``, ``P(d) ∝ ρ^d``, whose mean is
    at most (L + 1) / 2, for the uniform distribution of ρ = 1.

    Source: Nair and Lieck, section 3.1.4, whose text has both forms.
    """
    powers = rho ** torch.arange(num_layers, dtype=torch.float64)
    if proportional:
        return powers / powers.sum()
    powers[:-1] *= 1 - rho
    return powers


def rho_at(epoch: int, start: float, step: float) -> float:
    """Return ρ in an epoch, from 0: ``min(start + step · epoch, 1)``."""
    return min(start + step * epoch, 1.0)


def sample_depth(probabilities: Tensor, generator: torch.Generator) -> int:
    """Sample a depth, from 1."""
    weights = probabilities.to(generator.device)
    return 1 + int(torch.multinomial(weights, 1, generator=generator))
