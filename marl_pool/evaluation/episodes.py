"""One episode in every world: what evaluations play."""

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
"""Worlds that play at a time, where each is a simulator of its own."""


class Played(NamedTuple):
    """Finished episodes, by group."""

    returns: dict[str, np.ndarray]
    """``(episodes,)`` float64, mean over the group's agents, in the worlds' order."""
    self_query_lost: dict[str, float | None]
    """Share of decisions in which AdaPool's self token was padded; None elsewhere."""


def play(
    policies: Mapping[str, Policy],
    env: BatchedEnv,
    perturbation: Perturbation | None = None,
    *,
    explore: bool = False,
) -> Played:
    """Play one episode in every world.

    Args:
        policies: for each group; taken as they are, so put them into eval mode.
        env: reset here; two of the same numbers and seed play the same episodes.
        perturbation: between the world and the policies.
        explore: sample actions; otherwise take the most likely.
    """
    lost, parts = LostQueries(policies), []
    for rows in _turns(env):
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
    shares = {name: lost.share(name) for name in policies}
    return Played(returns, shares)


def _turns(env: BatchedEnv) -> tuple[Tensor, ...]:
    """The rows that play together, not too many simulators at a time."""
    rows = torch.arange(env.num_envs, device=env.device)
    return rows.split(SIMULATORS) if env.simulated else (rows,)


class LostQueries:
    """Count the decisions in which a query "self" found no self token.

    AdaPool then falls back to the mean of the tokens present, which is another
    function than the one trained. A hook for `Rollout.episodes`.

    Args:
        policies: by group; those without such a query are not counted.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.asking = {name for name, policy in policies.items() if asks_self(policy)}
        self.lost: dict[str, Tensor] = {}
        self.decisions = dict.fromkeys(policies, 0)

    def __call__(self, transition: Transition) -> None:
        """Look at one step."""
        for name in self.asking:
            tokens = transition.tokens[name]
            own = (tokens.types == SELF_TYPE) & ~tokens.padding
            lost = (~own.any(-1)).sum()
            self.lost[name] = self.lost.get(name, torch.zeros_like(lost)) + lost
            self.decisions[name] += own[..., 0].numel()

    def share(self, name: str) -> float | None:
        """The share of a group's decisions, None if it asks no such query."""
        if name not in self.asking:
            return None
        return float(self.lost[name]) / self.decisions[name]


def asks_self(policy: Policy) -> bool:
    """Whether the policy's pooling head takes the self token as its query."""
    if not isinstance(policy, TokenPolicy):
        return False
    return getattr(policy.network.pooling, "query", None) == "self"
