"""Evaluation episodes: one in every environment."""

from collections.abc import Mapping

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout

SIMULATORS = 32
"""Environments stepped at a time, if each is a simulator of its own."""


EpisodeReturns = dict[str, np.ndarray]
"""``(episodes,)`` float64 returns by group, mean over the group's agents, in order of
the environments."""


def play(
    policies: Mapping[str, Policy],
    env: BatchedEnv,
    perturbation: Perturbation | None = None,
    *,
    explore: bool = False,
) -> EpisodeReturns:
    """Play one episode in every environment.

    Args:
        policies: policies by group, in eval mode.
        env: reset here. Equal environment numbers and seeds give equal episodes.
        perturbation: applied between environment and policies.
        explore: sample actions instead of taking the most likely ones.
    """
    parts = []
    # Run no more than `SIMULATORS` simulators at a time.
    rows = torch.arange(env.num_envs, device=env.device)
    for chunk in rows.split(SIMULATORS) if env.simulated else (rows,):
        rollout = Rollout(
            env if len(chunk) == env.num_envs else env.select(chunk),
            policies,
            perturbation=perturbation,
            explore=explore,
        )
        parts.append(rollout.episodes().returns)
    # Average over the group's agents.
    return {
        name: torch.cat([part[name] for part in parts]).mean(1).cpu().numpy()
        for name in policies
    }
