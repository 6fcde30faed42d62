"""Evaluation episodes: one in every environment."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout, Transition

SIMULATORS = 32
"""Environments stepped at a time, if each is a simulator of its own."""


EpisodeReturns = dict[str, np.ndarray]
"""``(episodes,)`` float64 returns by group, mean over the group's agents, in order of
the environments."""


class Played(NamedTuple):
    """Returns of episodes."""

    returns: EpisodeReturns
    after: dict[int, EpisodeReturns]
    """By step of the episode: sums of the rewards in it and in all later steps."""


def play(
    policies: Mapping[str, Policy],
    env: BatchedEnv,
    perturbation: Perturbation | None = None,
    *,
    explore: bool = False,
    draw: int = 0,
    after: Collection[int] = (),
) -> Played:
    """Play one episode in every environment.

    Args:
        policies: policies by group, in eval mode.
        env: reset here. Equal environment numbers and seeds give equal episodes.
        perturbation: applied between environment and policies.
        explore: sample actions instead of taking the most likely ones.
        draw: number of the perturbation's sample; see `Rollout`.
        after: steps of an episode from which on rewards are summed, too.
    """
    parts, tails = [], []
    # Run no more than `SIMULATORS` simulators at a time.
    rows = torch.arange(env.num_envs, device=env.device)
    for chunk in rows.split(SIMULATORS) if env.simulated else (rows,):
        rollout = Rollout(
            env if len(chunk) == env.num_envs else env.select(chunk),
            policies,
            perturbation=perturbation,
            explore=explore,
            draw=draw,
        )
        tails.append(_Tails(rollout, after))
        parts.append(rollout.episodes(tails[-1] if after else None).returns)
    later = {step: _joined(own.sums[step] for own in tails) for step in after}
    return Played(_joined(parts), later)


class _Tails:
    """Sums of each environment's rewards from some steps on, for `Rollout.episodes`."""

    def __init__(self, rollout: Rollout, after: Collection[int]) -> None:
        self.env_ids, self.step = rollout.env.env_ids, 0
        self.sums: dict[int, dict[str, Tensor]] = {
            step: {
                name: self.env_ids.new_zeros(
                    (len(self.env_ids), group.num_agents), dtype=torch.float64
                )
                for name, group in rollout.env.groups.items()
            }
            for step in after
        }

    def __call__(self, transition: Transition) -> None:
        # Environments are numbered upwards, and those that are over have been dropped.
        rows = torch.searchsorted(self.env_ids, transition.env.env_ids)
        for step, sums in self.sums.items():
            for name, rewards in transition.step.rewards.items():
                if step <= self.step:
                    sums[name].index_add_(0, rows, rewards.double())
        self.step += 1


def _joined(parts: Iterable[Mapping[str, Tensor]]) -> EpisodeReturns:
    """Average over each group's agents, in all chunks of environments."""
    chunks = list(parts)
    return {
        name: torch.cat([part[name] for part in chunks]).mean(1).cpu().numpy()
        for name in chunks[0]
    }
