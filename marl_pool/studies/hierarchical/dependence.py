"""Dependence of a merging policy on its input."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Dependence(NamedTuple):
    """Means over inputs, in nats.

    Attributes:
        information: mutual information between the input (one of n, all alike) and the
            pair that is drawn: 0 for a generic policy, at most ``log n``.
        entropy: of the mean policy, which the information cannot exceed either.
        uniform: the entropy of a policy that finds all pairs alike.
    """

    information: float
    entropy: float
    uniform: float


def divergences(policies: Tensor) -> Tensor:
    """``KL(π_x ‖ π̄)`` of each policy from the mean of all, ``(n,)`` nats.

    Args:
        policies: ``(n, T, T)``, probabilities of pairs that sum to 1.
    """
    policies = policies.flatten(1).double()
    mean = policies.mean(0)
    return (torch.special.xlogy(policies, policies) - _times_log(policies, mean)).sum(1)


def dependence(policies: Tensor) -> Dependence:
    """Measure it on ``(n, T, T)`` policies of n inputs, of their first merge.

    The mean of `divergences` is the mutual information. In later merges tokens have
    no place that inputs share.
    """
    size, mean = policies.shape[1], policies.flatten(1).double().mean(0)
    return Dependence(
        float(divergences(policies).mean()),
        float(-torch.special.xlogy(mean, mean).sum()),
        math.log(max(size * (size - 1), 1)),
    )


def _times_log(left: Tensor, right: Tensor) -> Tensor:
    """``left log right``, where no left is above 0 without right being so."""
    return torch.where(left > 0, left * right.clamp(min=1e-300).log(), 0.0)
