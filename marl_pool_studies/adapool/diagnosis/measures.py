"""Observations of trained policies, and measures of a pooling head on them.

The measures are signal loss, relation scores and weight bounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.compiled import compile
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.timeout import env_call
from marl_pool.evaluation.cases import SIMULATORS
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.networks.set_network import SetNetwork
from marl_pool.pooling.attention import ClsPooling
from marl_pool.pooling.base import MemoryPooling, Pooling
from marl_pool.pooling.basic import MaxPooling
from marl_pool.pooling.multi import MultiPooling
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.trajectory import Transition
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool_studies.adapool.diagnosis import theory

CHUNK = 1024
"""Number of observations computed together, to bound memory."""


class GroupObservations(NamedTuple):
    """B observations of the active agents of one group."""

    tokens: Tokens
    """Token sets, batch shape ``(B,)``."""
    signal: Tensor
    """``(B, N)`` bool, True for unpadded tokens that matter for the task."""
    episodes: Tensor
    """``(B,)`` int64, number of each observation's episode."""

    def split(self, size: int) -> Iterator["GroupObservations"]:
        """Yield consecutive chunks of at most ``size`` observations."""
        for first in range(0, len(self.episodes), size):
            chunk = slice(first, first + size)
            yield GroupObservations(
                self.tokens.at(chunk), self.signal[chunk], self.episodes[chunk]
            )


def record_observations(
    target: EvaluationTarget, episodes: int, limit: int
) -> dict[str, GroupObservations]:
    """Play unperturbed episodes with deterministic actions and record observations.

    Each environment plays one episode. Where every step would exceed ``limit``, the
    maximal number of observations of each group, only every n-th step is recorded.

    Raises:
        UnfitTokensError: the environment defines no signal.
        InputError: ``limit`` is less than one step of all episodes.
    """
    # Fail before playing if the signal is undefined or the limit is too small.
    env = target.make_env(1)
    with env_call(env, "a reset"):
        env.reset()
    with env_call(env, "the signal"):
        env.signal()
    agents = max(group.num_agents for group in env.groups.values())
    if limit < episodes * agents:
        raise InputError(
            f"max_observations: expected at least {episodes * agents}, one of each "
            f"agent in {episodes} episodes, got {limit}"
        )
    # Record every n-th step, to stay below the limit in full-length episodes.
    stride = -(-env.max_steps // (limit // (episodes * agents)))
    # Simulators are expensive: play a few at a time, other environments all together.
    batch = SIMULATORS if env.simulated else episodes
    chunks: dict[str, list[GroupObservations]] = {name: [] for name in env.groups}
    for first in range(0, episodes, batch):
        envs = target.make_env(min(batch, episodes - first), first=first)
        rollout = Rollout(envs, target.policies)
        rollout.episodes(on_step=_recorder(rollout.env, stride, first, chunks))
    return {name: _concatenate(group_chunks) for name, group_chunks in chunks.items()}


def _recorder(
    env: BatchedEnv,
    stride: int,
    first: int,
    chunks: Mapping[str, list[GroupObservations]],
) -> Callable[[Transition], None]:
    """Make a hook of `Rollout.episodes` that appends every n-th step to ``chunks``.

    The environments are in their initial state, and the first one plays the episode of
    the number ``first``; n is ``stride``.
    """
    first_env, steps = int(env.env_ids[0]), count()
    # A transition holds the environment after the step, but its tokens are from
    # before: keep masks from before, for all environments, finished ones included.
    active = {name: mask.clone() for name, mask in env.active.items()}
    signal = {name: mask.clone() for name, mask in env.signal().items()}

    def record(transition: Transition) -> None:
        # Finished environments are dropped: find the rows of the remaining ones.
        rows = transition.env.env_ids - first_env
        signal_after, recorded = transition.env.signal(), next(steps) % stride == 0
        # Record the observations acted on, with the signal as it was before the step.
        for name, tokens in transition.tokens.items():
            if recorded:
                acting = active[name][rows]
                numbers = (rows + first)[:, None].expand_as(acting)[acting]
                marked = signal[name][rows][acting]
                chunk = GroupObservations(tokens.at(acting), marked, numbers)
                chunks[name].append(chunk)
            active[name][rows] = transition.env.active[name]
            signal[name][rows] = signal_after[name]

    return record


def _concatenate(chunks: Sequence[GroupObservations]) -> GroupObservations:
    tokens, signal, episodes = zip(*chunks, strict=True)
    parts = zip(*(chunk.parts for chunk in tokens), strict=True)
    joined_tokens = Tokens(*map(torch.cat, parts))
    return GroupObservations(joined_tokens, torch.cat(signal), torch.cat(episodes))


class PooledSets(NamedTuple):
    """Pooled vectors of B sets, in the space of the encoder's outputs."""

    vectors: Tensor
    """``(B, D)``: x_c."""
    heads: int
    """Number of parts of the features that are pooled separately."""
    weights: Tensor | None
    """``(B, heads, N)``; None if the vector is no weighted sum of the tokens."""
    scores: Tensor | None
    """``(B, heads, N)``, logits of the weights; None without a softmax."""


class HeadMeasures(NamedTuple):
    """Measures of a pooling head on B observations; undefined ones are NaN."""

    numbers: dict[str, Tensor]
    """``(B, heads)`` float64 by name."""
    moments: theory.Moments
    """Moments of the encoder's outputs."""
    num_signal: Tensor
    """``(B,)``: k."""


def pool_as_in_theory(
    head: Pooling, x: Tensor, padding: Tensor | None, types: Tensor | None
) -> PooledSets:
    """Pool with the head's attention weights, W_V = W_O = I and no residual.

    The weights of `MaxPooling` are 0 and 1 with a head for each feature. `ClsPooling`
    has none: its result, the encoder's output at the class token, is taken as x_c. The
    class token belongs to no set and counts as neither signal nor noise.

    A head with extra tokens and weights keeps the weighted extra tokens in x_c, where
    they act like noise. They come first in ``x (B, E + N, D)``, which is zero for
    padded tokens; ``padding`` and ``types`` are ``(B, E + N)``.

    Raises:
        UnfitTokensError: a head without weights, a recurrent one, or several heads in
            parallel.
    """
    name, width = type(head).__name__, x.shape[-1]
    # The class token's output is a vector without weights over the set.
    if isinstance(head, ClsPooling):
        return PooledSets(head(x, padding, types), 1, None, None)
    if isinstance(head, MemoryPooling):
        raise UnfitTokensError(
            f"expected a pooling head without memory, got {name}: its weights depend "
            "on earlier sets"
        )
    if isinstance(head, MultiPooling):
        # Each of its heads weights whole vectors, not a part of the features.
        raise UnfitTokensError(f"expected a single pooling head, got {name}")
    # Max pooling selects one token for each feature.
    is_max = isinstance(head, MaxPooling)
    weights = (
        theory.max_weights(x, padding) if is_max else head.weights(x, padding, types)
    )
    if weights is None:
        raise UnfitTokensError(f"expected a head with attention weights, got {name}")
    heads = weights.shape[1]
    if width % heads:
        raise UnfitTokensError(
            f"expected a number of heads that divides {width} features, got {heads}"
        )
    vectors, scores = theory.pool(x, weights), head.logits(x, padding, types)
    # Extra tokens contribute to x_c, but are not part of the set.
    extra = head.extra_tokens
    if scores is not None:
        scores = scores[..., extra:]
    return PooledSets(vectors, heads, weights[..., extra:], scores)


@torch.no_grad()
def measure_head(network: SetNetwork, observations: GroupObservations) -> HeadMeasures:
    """Measure a network's pooling head on observations.

    Raises:
        UnfitTokensError: a pooling head without weights.
    """
    network = compile(network)
    chunks = [_measure(network, chunk) for chunk in observations.split(CHUNK)]
    numbers, moments, num_signal = zip(*chunks, strict=True)
    return HeadMeasures(
        {name: torch.cat([chunk[name] for chunk in numbers]) for name in numbers[0]},
        theory.Moments(*map(torch.cat, zip(*moments, strict=True))),
        torch.cat(num_signal),
    )


def _measure(network: SetNetwork, observations: GroupObservations) -> HeadMeasures:
    # Encode and pool as the network does, then drop the head's extra tokens.
    head = network.pooling
    x, padding, types = head.prepare(*network.encode(observations.tokens))
    pooled = pool_as_in_theory(head, x, padding, types)
    extra = head.extra_tokens
    x, signal = x[:, extra:], observations.signal
    padding = None if padding is None else padding[:, extra:]

    # Losses are defined for every head, attention measures only for heads with weights.
    moments = theory.moments(x, padding)
    numbers = {
        "signal_loss": theory.signal_loss(x, pooled.vectors, signal, pooled.heads),
        "excess": theory.excess_loss(x, pooled.vectors, signal, pooled.heads),
        "mean_excess": theory.excess_loss(x, moments.mean, signal, pooled.heads),
    }
    if pooled.weights is not None:
        numbers["signal_weight"] = _total(pooled.weights, signal)
        if network.spec.has_self:
            is_self = observations.tokens.types == SELF_TYPE
            numbers["self_weight"] = _total(pooled.weights, is_self)
    if pooled.weights is not None and pooled.scores is not None:
        numbers |= _score_measures(pooled.weights, pooled.scores, signal, padding)
    return HeadMeasures(numbers, moments, signal.sum(-1))


def _score_measures(
    weights: Tensor, scores: Tensor, signal: Tensor, padding: Tensor | None
) -> dict[str, Tensor]:
    """Equations 8 and 9, and the weights against the bounds of Theorem 3.12."""
    total = _total(weights, signal)
    # Add a dimension for the heads.
    signal = signal[:, None]
    padding = None if padding is None else padding[:, None]
    ranges = theory.neighborhoods(scores, signal, padding)
    bounds = theory.weight_bounds(ranges)
    violated = theory.outside(weights, signal, bounds, padding)
    return {
        **{key: getattr(ranges, key) for key in theory.Neighborhoods._fields[2:]},
        **bounds._asdict(),
        "signal_error": _mean(1 - total, ranges.num_signal),
        "noise_error": _mean(total - 1, ranges.num_tokens - ranges.num_signal),
        "checked": ranges.num_tokens,
        "violations": violated.sum(-1).double(),
    }


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Total over count; NaN for count 0."""
    return total / count.masked_fill(count == 0, torch.nan)


def _total(weights: Tensor, mask: Tensor) -> Tensor:
    """Sum of the weights of the masked-in tokens, ``(B, heads)``."""
    return (weights * mask[:, None]).sum(-1).double()
