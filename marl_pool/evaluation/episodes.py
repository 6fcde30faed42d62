"""Evaluation episodes: one in every environment."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import SELF_TYPE

SIMULATORS = 32
"""Environments stepped at a time, if each is a simulator of its own."""


class EpisodeReturns(NamedTuple):
    """Finished episodes, by group."""

    returns: dict[str, np.ndarray]
    """``(episodes,)`` float64, mean over the group's agents, in order of the envs."""
    self_query_lost: dict[str, float | None]
    """Fraction of decisions with AdaPool's self token padded; None for other heads."""


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
    lost, parts = LostQueries(policies), []
    # Run no more than `SIMULATORS` simulators at a time.
    rows = torch.arange(env.num_envs, device=env.device)
    for chunk in rows.split(SIMULATORS) if env.simulated else (rows,):
        rollout = Rollout(
            env if len(chunk) == env.num_envs else env.select(chunk),
            policies,
            perturbation=perturbation,
            explore=explore,
        )
        parts.append(rollout.episodes(on_step=lost).returns)
    # Average over the group's agents.
    returns = {
        name: torch.cat([part[name] for part in parts]).mean(1).cpu().numpy()
        for name in policies
    }
    return EpisodeReturns(returns, {name: lost.fraction(name) for name in policies})


class LostQueries:
    """Count the decisions in which the query ``"self"`` found no self token.

    AdaPool then falls back to the mean of the tokens present, which is not the function
    that was trained. Used as ``on_step`` of `Rollout.episodes`. Policies without such a
    query are not counted.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.lost: dict[str, Tensor] = {
            name: torch.zeros((), dtype=torch.int64)
            for name, policy in policies.items()
            if has_self_query(policy)
        }
        self.decisions = dict.fromkeys(self.lost, 0)

    def __call__(self, transition: Transition) -> None:
        """Count the decisions of one step."""
        for name in self.lost:
            tokens = transition.tokens[name]
            # Counts stay on the device, so that no step waits for it.
            own = (tokens.types == SELF_TYPE) & ~tokens.padding
            self.lost[name] = (~own.any(-1)).sum() + self.lost[name].to(own.device)
            self.decisions[name] += own[..., 0].numel()

    def fraction(self, name: str) -> float | None:
        """Return the fraction of a group's decisions, None without such a query."""
        if name not in self.lost:
            return None
        return float(self.lost[name]) / self.decisions[name]


def has_self_query(policy: Policy) -> bool:
    """Return True if the policy's pooling head takes the self token as its query."""
    head = policy.network.pooling if isinstance(policy, TokenPolicy) else None
    return getattr(head, "query", None) == "self"
