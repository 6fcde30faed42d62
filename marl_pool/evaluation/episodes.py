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
    for rows in _chunks(env):
        rollout = Rollout(
            env if len(rows) == env.num_envs else env.select(rows),
            policies,
            perturbation=perturbation,
            explore=explore,
        )
        parts.append(rollout.episodes(on_step=lost).returns)
    returns = {
        name: torch.cat([part[name] for part in parts]).mean(1).cpu().numpy()
        for name in policies
    }
    return EpisodeReturns(returns, {name: lost.fraction(name) for name in policies})


def _chunks(env: BatchedEnv) -> tuple[Tensor, ...]:
    """Split the rows so that no more than `SIMULATORS` simulators run at a time."""
    rows = torch.arange(env.num_envs, device=env.device)
    return rows.split(SIMULATORS) if env.simulated else (rows,)


class LostQueries:
    """Count the decisions in which the query ``"self"`` found no self token.

    AdaPool then falls back to the mean of the tokens present, which is not the function
    that was trained. Used as ``on_step`` of `Rollout.episodes`.

    Args:
        policies: policies by group; those without such a query are not counted.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.groups = {
            name for name, policy in policies.items() if has_self_query(policy)
        }
        self.lost: dict[str, Tensor] = {}
        self.decisions = dict.fromkeys(policies, 0)

    def __call__(self, transition: Transition) -> None:
        """Count the decisions of one step."""
        for name in self.groups:
            tokens = transition.tokens[name]
            own = (tokens.types == SELF_TYPE) & ~tokens.padding
            lost = (~own.any(-1)).sum()
            self.lost[name] = self.lost.get(name, torch.zeros_like(lost)) + lost
            self.decisions[name] += own[..., 0].numel()

    def fraction(self, name: str) -> float | None:
        """Return the fraction of a group's decisions, None without such a query."""
        if name not in self.groups:
            return None
        return float(self.lost[name]) / self.decisions[name]


def has_self_query(policy: Policy) -> bool:
    """Return True if the policy's pooling head takes the self token as its query."""
    if not isinstance(policy, TokenPolicy):
        return False
    return getattr(policy.network.pooling, "query", None) == "self"
