"""What a pooling head makes of the signal, observation by observation."""

from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.evaluation.diagnosis import theory
from marl_pool.evaluation.diagnosis.observations import Observed
from marl_pool.networks import SetNetwork
from marl_pool.policies.base import Policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling.base import Pooling
from marl_pool.pooling.basic import MaxPooling
from marl_pool.pooling.cls_token import ClsPooling
from marl_pool.pooling.memory import MemoryPooling
from marl_pool.pooling.multi import MultiPooling
from marl_pool.tokens import SELF_TYPE
from marl_pool.utils.errors import UnfitTokensError

ROWS = 1024
"""Observations at a time: so memory is bounded."""


class Pooled(NamedTuple):
    """A head's result on a batch of sets, in the space of the set's own vectors."""

    vectors: Tensor
    """``(B, D)``: x_c."""
    heads: int
    """Parts of the vectors that are pooled apart."""
    weights: Tensor | None
    """``(B, heads, N)``, None where the result is no sum over the tokens."""
    scores: Tensor | None
    """``(B, heads, N)``, whose softmax the weights are; None without attention."""


class Cases(NamedTuple):
    """Measures of B observations; NaN where one is not defined."""

    numbers: dict[str, Tensor]
    """By name, each ``(B, heads)`` float64."""
    transitions: theory.Moments
    """Of the vectors below the head."""
    num_signal: Tensor
    """``(B,)``: k."""


def pooled(
    head: Pooling, x: Tensor, padding: Tensor | None, types: Tensor | None
) -> Pooled:
    """Pool with the head's weights, W_V = W_O = I and no residual.

    MaxPool's weights are 0 and 1, a head for each feature. ClsToken has none: the
    vector that it returns is the encoder's output at a place of its own, no sum over
    the tokens. It is taken for x_c as it is; the place belongs to no set, counts as
    neither signal nor noise, and no weight is claimed for any token.

    A head with extra tokens and with weights keeps the weights of its own places in
    x_c, where they do the same as noise.

    Args:
        head: a pooling head.
        x: ``(B, E + N, D)``, zero under padding; the head's E extra tokens first.
        padding: ``(B, E + N)`` bool, True = ignore; None where nothing is padded.
        types: ``(B, E + N)`` int64.

    Raises:
        UnfitTokensError: a head without weights, one that remembers, or several heads
            side by side.
    """
    name, width = type(head).__name__, x.shape[-1]
    if isinstance(head, ClsPooling):
        return Pooled(head(x, padding, types), 1, None, None)
    if isinstance(head, MemoryPooling):
        raise UnfitTokensError(
            f"expected one weighted mean of a set, got {name}, whose codes depend on "
            "earlier sets"
        )
    if isinstance(head, MultiPooling):
        # Each of its parts weighs whole vectors, not a share of the features.
        raise UnfitTokensError(f"expected one mean of a set, got {name}, several heads")
    if isinstance(head, MaxPooling):
        weights: Tensor | None = theory.max_weights(x, padding)
    else:
        weights = head.weights(x, padding, types)
    if weights is None:
        raise UnfitTokensError(f"expected a head with weights, which {name} has not")
    heads = weights.shape[1]
    if width % heads:
        raise UnfitTokensError(
            f"expected heads that divide the {width} features between them, got {heads}"
        )
    vectors, scores = theory.pool(x, weights), head.logits(x, padding, types)
    own = head.extra_tokens
    if scores is not None:
        scores = scores[..., own:]
    return Pooled(vectors, heads, weights[..., own:], scores)


def network_of(policy: Policy) -> SetNetwork:
    """The network that a policy acts by.

    Raises:
        UnfitTokensError: it has no encoder with a pooling head.
    """
    if isinstance(policy, TokenPolicy):
        return policy.network
    raise UnfitTokensError(
        "expected a policy that pools an encoder's outputs, got "
        f"{type(policy).__name__}"
    )


@torch.no_grad()
def measure_cases(network: SetNetwork, observed: Observed) -> Cases:
    """Measure a network's head on observations.

    Raises:
        UnfitTokensError: a head without weights.
    """
    parts = [_measure(network, part) for part in observed.split(ROWS)]
    return Cases(
        {
            name: torch.cat([part.numbers[name] for part in parts])
            for name in parts[0].numbers
        },
        theory.Moments(
            *(torch.cat(f) for f in zip(*(p.transitions for p in parts), strict=True))
        ),
        torch.cat([part.num_signal for part in parts]),
    )


def _measure(network: SetNetwork, observed: Observed) -> Cases:
    head = network.pooling
    x, padding, types = head.prepare(*network.encode(observed.tokens))
    found = pooled(head, x, padding, types)
    own = head.extra_tokens
    x, signal = x[:, own:], observed.signal
    padding = None if padding is None else padding[:, own:]
    transitions = theory.transitions(x, padding)
    numbers = {
        "signal_loss": theory.signal_loss(x, found.vectors, signal, found.heads),
        "excess": theory.excess_loss(x, found.vectors, signal, found.heads),
        "mean_excess": theory.excess_loss(x, transitions.mean, signal, found.heads),
    }
    if found.weights is not None:
        numbers["signal_weight"] = _total(found.weights, signal)
        if network.spec.has_self:
            is_self = observed.tokens.types == SELF_TYPE
            numbers["self_weight"] = _total(found.weights, is_self)
    if found.weights is not None and found.scores is not None:
        numbers |= _bounded(found.weights, found.scores, signal, padding)
    return Cases(numbers, transitions, signal.sum(-1))


def _bounded(
    weights: Tensor, scores: Tensor, signal: Tensor, padding: Tensor | None
) -> dict[str, Tensor]:
    """Equations 8 and 9, and Theorem 3.12 beside the real weights."""
    signal = signal[:, None]
    padding = None if padding is None else padding[:, None]
    found = theory.neighborhoods(scores, signal, padding)
    bounds = theory.weight_bounds(found)
    weight = _total(weights, signal[:, 0])
    broken = theory.outside(weights, signal, bounds, padding)
    return {
        **{key: getattr(found, key) for key in theory.Neighborhoods._fields[2:]},
        **bounds._asdict(),
        "signal_error": _share(1 - weight, found.num_signal),
        "noise_error": _share(weight - 1, found.num_tokens - found.num_signal),
        "checked": found.num_tokens,
        "violations": broken.sum(-1).double(),
    }


def _share(total: Tensor, count: Tensor) -> Tensor:
    """Of each of ``count``; NaN for none."""
    return total / count.masked_fill(count == 0, torch.nan)


def _total(weights: Tensor, chosen: Tensor) -> Tensor:
    """The weight of the chosen tokens together, ``(B, heads)``."""
    return (weights * chosen[:, None]).sum(-1).double()
