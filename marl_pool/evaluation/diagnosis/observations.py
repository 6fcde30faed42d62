"""What policies see in some episodes, and which of it is signal."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.episodes import SIMULATORS
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class Observed:
    """B observations of one group, of agents that were active.

    Attributes:
        tokens: of batch ``(B,)``.
        signal: ``(B, N)`` bool, the unpadded tokens that matter for the task.
        episodes: ``(B,)`` int64, the episode of each.
    """

    tokens: Tokens
    signal: Tensor
    episodes: Tensor

    def split(self, rows: int) -> Iterator["Observed"]:
        """Yield parts of so many observations."""
        for first in range(0, len(self.episodes), rows):
            part = slice(first, first + rows)
            yield Observed(self.tokens.at(part), self.signal[part], self.episodes[part])


def observe(subject: EvaluationTarget, episodes: int, most: int) -> dict[str, Observed]:
    """Let the policies play, and keep what they see.

    If that is more than ``most`` observations of a group, every n-th step is kept.

    Args:
        subject: plays its evaluation worlds, acting as is most likely.
        episodes: one in each of as many worlds.
        most: observations of each group, at most.

    Returns:
        By group.

    Raises:
        UnfitTokensError: the world does not know its signal.
        InputError: ``most`` is less than one step of all episodes.
    """
    env = subject.make_env(1)
    env.reset()
    env.signal()  # it says at once if it knows none
    agents = max(group.num_agents for group in env.groups.values())
    if most < episodes * agents:
        raise InputError(
            f"max_observations: expected at least {episodes * agents}, one of each "
            f"agent in {episodes} episodes, got {most}"
        )
    stride = -(-episodes * agents * env.max_steps // most)
    together = SIMULATORS if env.simulated else episodes
    recorders = []
    for first in range(0, episodes, together):
        worlds = subject.make_env(min(together, episodes - first), first=first)
        rollout = Rollout(worlds, subject.policies)
        recorder = _Recorder(rollout.env, stride, first)
        rollout.episodes(on_step=recorder)
        recorders.append(recorder)
    return {name: _joined(name, recorders) for name in env.groups}


class _Recorder:
    """A hook for `Rollout.episodes`.

    Args:
        world: as it stands before the first step.
        stride: every so many steps one is kept.
        first: number of the first episode.
    """

    def __init__(self, env: BatchedEnv, stride: int, first: int) -> None:
        self.stride, self.first, self.time = stride, first, 0
        self.number = int(env.env_ids[0])
        self.kept: dict[str, list[Observed]] = {name: [] for name in env.groups}
        # Before the coming step, of all worlds, also of those that are dropped later.
        self.active = {name: own.clone() for name, own in env.active.items()}
        self.signal = {name: own.clone() for name, own in env.signal().items()}

    def __call__(self, transition: Transition) -> None:
        rows = transition.env.env_ids - self.number
        if self.time % self.stride == 0:
            for name, tokens in transition.tokens.items():
                self._keep(name, tokens, rows)
        active, signal = transition.env.active, transition.env.signal()
        for name in self.kept:
            self.active[name][rows] = active[name]
            self.signal[name][rows] = signal[name]
        self.time += 1

    def _keep(self, name: str, tokens: Tokens, rows: Tensor) -> None:
        living = self.active[name][rows]
        episodes = (rows + self.first)[:, None].expand_as(living)
        signal = self.signal[name][rows]
        self.kept[name].append(
            Observed(tokens.at(living), signal[living], episodes[living])
        )


def _joined(name: str, recorders: list[_Recorder]) -> Observed:
    parts = [part for recorder in recorders for part in recorder.kept[name]]
    tokens = zip(*(part.tokens for part in parts), strict=True)
    return Observed(
        Tokens(*(torch.cat(tensors) for tensors in tokens)),
        torch.cat([part.signal for part in parts]),
        torch.cat([part.episodes for part in parts]),
    )
