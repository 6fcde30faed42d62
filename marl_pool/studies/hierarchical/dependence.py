"""Dependence of a merging policy on its input, as mutual information."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Dependence(NamedTuple):
    """Information measures of policies on n equally likely inputs, in nats.

    Attributes:
        information: mutual information of the input and the sampled pair; 0 for a
            policy that ignores its input, at most ``log n``.
        entropy: entropy of the mean policy, an upper bound of the information.
        uniform: entropy of the uniform policy.
    """

    information: float
    entropy: float
    uniform: float


def divergences(policies: Tensor) -> Tensor:
    """Compute ``KL(π_x ‖ π̄)`` of each policy from the mean of all, ``(n,)`` nats.

    Args:
        policies: ``(n, T, T)``, probabilities of pairs, which sum to 1.
    """
    policies = policies.flatten(1).double()
    # Clamped, so that 0 log 0 is 0 where no policy has the pair.
    log_mean = policies.mean(0).clamp(min=1e-300).log()
    return (torch.special.xlogy(policies, policies) - policies * log_mean).sum(1)


def dependence(policies: Tensor) -> Dependence:
    """Measure the dependence of the first merge's policies on the input.

    The mean of `divergences` is the mutual information. Later merges cannot be
    compared, because their tokens do not correspond between inputs.

    Args:
        policies: ``(n, T, T)``, probabilities of pairs for n inputs.
    """
    size, mean = policies.shape[1], policies.flatten(1).double().mean(0)
    return Dependence(
        float(divergences(policies).mean()),
        float(torch.special.entr(mean).sum()),
        math.log(max(size * (size - 1), 1)),
    )
