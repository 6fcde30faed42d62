"""Choices of merges: schedules, random depths, a gradient, dependence on the input."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marl_pool.encoders.merging import pair_counts
from marl_pool.utils.errors import InputError

Credit = Literal["own", "batch"]


def merging_schedule(num_tokens: int, proportion: float, num_layers: int) -> list[int]:
    """Compute the merges of each layer, ``r = ⌊p T / 2⌋`` of its T tokens.

    256 tokens become 91, 27 and 1 over 8 layers with p = 0.25, 0.5 and 1.

    ``num_tokens`` is the number before the first layer; ``proportion`` is p, the
    fraction of tokens that merge, in [0, 1].

    Source: Nair and Lieck, Table 1.
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


def sample_depth(probabilities: Tensor, generator: torch.Generator) -> int:
    """Sample a depth, from 1."""
    weights = probabilities.to(generator.device)
    return 1 + int(torch.multinomial(weights, 1, generator=generator))


def surrogate(
    losses: Tensor, log_prob: Tensor, *, credit: Credit = "own", baseline: bool = False
) -> Tensor:
    r"""Compute a scalar whose gradient estimates the gradient of the expected loss.

    .. math:: \frac{1}{B} \sum_b \mathrm{sg}(g_b) \log p(Y_b) + g_b

    with the losses g, the choices Y and the stop-gradient operator sg: REINFORCE
    (Williams, 1992) for the choices and the plain gradient for the rest. The value of
    the result is the mean loss, because sg(log p) is subtracted from log p.

    Source: Nair and Lieck, equations 3 and 4. Their implementation accumulates the
    gradients of log-probabilities over a batch and then scales the sum by the mean loss
    (section 3.1.5), so every sample is credited with the batch's loss. That is
    ``credit="batch"``, which is not an unbiased estimate of the gradient.

    Args:
        losses: ``(B,)``, loss g of each sample.
        log_prob: ``(B,)``, log-probability of each sample's choices.
        credit: weight of a sample's log-probability: its own loss or the batch's mean.
        baseline: subtract the mean loss of the other samples from a sample's own; the
            expectation stays the same for independent samples. The paper has none.
    """
    weight = losses.detach()
    if credit == "batch":
        weight = weight.mean().expand_as(weight)
    elif baseline and len(losses) > 1:
        # g_b - mean of the others = (g_b - mean) B / (B - 1).
        weight = (weight - weight.mean()) * (len(losses) / (len(losses) - 1))
    return (weight * (log_prob - log_prob.detach()) + losses).mean()


class Dependence(NamedTuple):
    """Information measures of policies on n equally likely inputs, in nats."""

    information: float
    """Mutual information of the input and the sampled pair; 0 for a policy that ignores
    its input, at most ``log n``."""
    entropy: float
    """Entropy of the mean policy, an upper bound of the information."""
    uniform: float
    """Entropy of the uniform policy."""


def divergences(policies: Tensor) -> Tensor:
    """Compute ``KL(π_x ‖ π̄)`` of each policy from the mean of all, ``(n,)`` nats.

    ``policies (n, T, T)`` are probabilities of pairs, which sum to 1.
    """
    policies = policies.flatten(1).double()
    # Clamped, so that 0 log 0 is 0 where no policy has the pair.
    log_mean = policies.mean(0).clamp(min=1e-300).log()
    return (torch.special.xlogy(policies, policies) - policies * log_mean).sum(1)


def dependence(policies: Tensor) -> Dependence:
    """Measure the dependence of the first merge's policies ``(n, T, T)`` on the input.

    The mean of `divergences` is the mutual information. Later merges cannot be
    compared, because their tokens do not correspond between inputs.
    """
    size, mean = policies.shape[1], policies.flatten(1).double().mean(0)
    return Dependence(
        float(divergences(policies).mean()),
        float(torch.special.entr(mean).sum()),
        math.log(max(size * (size - 1), 1)),
    )
