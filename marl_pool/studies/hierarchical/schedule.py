"""Schedules of merges per layer, and random depths."""

import torch
from torch import Tensor

from marl_pool.encoders.merging import pair_counts


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


def depth_probabilities(rho: float, num_layers: int) -> Tensor:
    """Compute the probabilities of the depths 1 to L, ``(L,)`` float64.

    ``P(d) = ρ^(d-1) (1 - ρ)`` and ``P(L) = ρ^(L-1)``, where ρ is the probability of
    continuing to the next layer.

    Source: Nair and Lieck, section 3.1.4. Its text also has ``P(d) ∝ ρ^d``, by which
    the full depth is at best as probable as any other.
    """
    powers = rho ** torch.arange(num_layers, dtype=torch.float64)
    powers[:-1] *= 1 - rho
    return powers


def sample_depth(probabilities: Tensor, generator: torch.Generator) -> int:
    """Sample a depth, from 1."""
    weights = probabilities.to(generator.device)
    return 1 + int(torch.multinomial(weights, 1, generator=generator))
