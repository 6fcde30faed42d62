"""Observations of trained policies in some episodes, with masks of their signal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.episodes import SIMULATORS
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class GroupObservations:
    """B observations of the active agents of one group.

    Attributes:
        tokens: token sets, batch shape ``(B,)``.
        signal: ``(B, N)`` bool, True for unpadded tokens that matter for the task.
        episodes: ``(B,)`` int64, number of each observation's episode.
    """

    tokens: Tokens
    signal: Tensor
    episodes: Tensor

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

    Where every step would exceed ``limit``, only every n-th step is recorded.

    Args:
        target: policies and evaluation environments.
        episodes: number of episodes, one in each environment.
        limit: maximal number of observations of each group.

    Raises:
        UnfitTokensError: the environment defines no signal.
        InputError: ``limit`` is less than one step of all episodes.
    """
    # Fail before playing if the signal is undefined or the limit is too small.
    env = target.make_env(1)
    env.reset()
    env.signal()
    agents = max(group.num_agents for group in env.groups.values())
    if limit < episodes * agents:
        raise InputError(
            f"max_observations: expected at least {episodes * agents}, one of each "
            f"agent in {episodes} episodes, got {limit}"
        )
    # Record every n-th step, to stay below the limit in full-length episodes.
    stride = -(-episodes * agents * env.max_steps // limit)
    # Simulators are expensive: play a few at a time, other environments all together.
    batch = SIMULATORS if env.simulated else episodes
    chunks: dict[str, list[GroupObservations]] = {name: [] for name in env.groups}
    for first in range(0, episodes, batch):
        envs = target.make_env(min(batch, episodes - first), first=first)
        rollout = Rollout(envs, target.policies)
        rollout.episodes(on_step=_recorder(rollout.env, stride, first, chunks))
    return {name: _concatenate(own) for name, own in chunks.items()}


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
    active = {name: own.clone() for name, own in env.active.items()}
    signal = {name: own.clone() for name, own in env.signal().items()}

    def record(transition: Transition) -> None:
        # Finished environments are dropped: find the rows of the remaining ones.
        rows = transition.env.env_ids - first_env
        now, recorded = transition.env.signal(), next(steps) % stride == 0
        # Record the observations acted on, with the signal as it was before the step.
        for name, tokens in transition.tokens.items():
            if recorded:
                acting = active[name][rows]
                numbers = (rows + first)[:, None].expand_as(acting)[acting]
                marked = signal[name][rows][acting]
                chunk = GroupObservations(tokens.at(acting), marked, numbers)
                chunks[name].append(chunk)
            active[name][rows] = transition.env.active[name]
            signal[name][rows] = now[name]

    return record


def _concatenate(chunks: Sequence[GroupObservations]) -> GroupObservations:
    tokens = zip(*(chunk.tokens for chunk in chunks), strict=True)
    return GroupObservations(
        Tokens(*map(torch.cat, tokens)),
        torch.cat([chunk.signal for chunk in chunks]),
        torch.cat([chunk.episodes for chunk in chunks]),
    )
