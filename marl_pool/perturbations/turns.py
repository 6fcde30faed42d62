"""Perturbations in turn-based environments, where an agent's time is its own turns."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marl_pool.perturbations.base import ActionSpace, Perturbation, PerturbationState
from marl_pool.tokens import Tokens, like
from marl_pool.utils.devices import may_read

if TYPE_CHECKING:
    from marl_pool.envs.base import BatchedEnv
    from marl_pool.envs.description import EnvDescription

BEGUN = "begun"
"""Entry of a state: ``(num_envs, agents)`` bool, the agent has had a turn."""


def validate_fits(
    perturbation: Perturbation, env: "BatchedEnv | EnvDescription"
) -> None:
    """Raise UnfitTokensError if a perturbation's options do not fit an environment."""
    counts = {name: group.num_agents for name, group in env.groups.items()}
    # The largest number of an agent's steps in an episode, with equal turns.
    turns = sum(counts.values()) if env.turn_based else 1
    perturbation.validate_env(counts, math.ceil(env.max_steps / turns))


class OwnTurns:
    """A perturbation that sees each agent only in the turns in which it acts.

    In the turns of others an agent observes padding, which no delay, frozen reading or
    choice of tokens may remember. So each agent has a separate state of the
    perturbation of its whole group. The state starts at the agent's first turn and is
    unchanged in the turns of others, like a policy's, and only the agent's part of the
    results is used: the same tokens, with the same random numbers, as if there were no
    other turns.

    The tensors of a state, ``(num_envs, agents, …)``, hold the states of all agents.

    Args:
        perturbation: the perturbation of a group of agents.
    """

    def __init__(self, perturbation: Perturbation) -> None:
        self.perturbation = perturbation

    def start(
        self, acting: Tensor, state: PerturbationState | None, where: Tensor | None
    ) -> PerturbationState:
        """Return the state before the first turn of an episode.

        Args:
            acting: ``(num_envs, agents)`` bool, agents in turn.
            state: of the environments that are not reset; None at the first start.
            where: ``(num_envs,)`` bool, the environments that are reset; None for all.
        """
        if state is None or where is None:
            return {BEGUN: torch.zeros_like(acting)}
        return {**state, BEGUN: state[BEGUN] & ~where[:, None]}

    def __call__(
        self,
        tokens: Tokens,
        state: PerturbationState,
        acting: Tensor,
        keys: Tensor,
        episodes: Tensor,
    ) -> tuple[Tokens, PerturbationState]:
        """Perturb the tokens of one turn; return them and the next state.

        Args:
            tokens: of batch ``(num_envs, agents)``.
            state: from `start` or an earlier call.
            acting: ``(num_envs, agents)`` bool, agents in turn.
            keys: ``(num_envs,)`` as in `Perturbation.start`.
            episodes: ``(num_envs,)`` as in `Perturbation.start`.
        """
        count = acting.shape[1]
        groups = tokens.map(lambda part: part.repeat_interleave(count, 0))
        first = acting & ~state[BEGUN]
        is_new = len(state) == 1
        if is_new or not may_read(first) or first.any():
            keys, episodes = (
                part.repeat_interleave(count) for part in (keys, episodes)
            )
            started = self.perturbation.start(groups, keys, episodes=episodes)
            state = _merge(first, started, state)
        perturbed, after = self.perturbation(groups, flatten(state))
        state = {**_merge(acting, after, state), BEGUN: state[BEGUN] | acting}
        return perturbed.map(lambda part: _of_each_agent(part, count)), state

    def origin(
        self, perturbed: Tokens, state: PerturbationState, num_tokens: int
    ) -> Tensor:
        """Return where the tokens of a turn come from; see `Perturbation.origin`."""
        count = perturbed.types.shape[1]
        groups = perturbed.map(lambda part: part.repeat_interleave(count, 0))
        origin = self.perturbation.origin(groups, flatten(state), num_tokens)
        return _of_each_agent(origin, count)

    def act(
        self,
        actions: Tensor,
        state: PerturbationState,
        space: ActionSpace,
        acting: Tensor,
    ) -> tuple[Tensor, PerturbationState]:
        """Perturb the actions of one turn; see `Perturbation.act`."""
        count = acting.shape[1]
        groups = actions.repeat_interleave(count, 0)
        changed, after = self.perturbation.act(groups, flatten(state), space)
        return _of_each_agent(changed, count), _merge(acting, after, state)


def flatten(state: PerturbationState) -> PerturbationState:
    """Return the states of all agents as one of a batch ``(num_envs · agents, …)``."""
    return {key: part.flatten(0, 1) for key, part in state.items() if key != BEGUN}


def _of_each_agent(part: Tensor, count: int) -> Tensor:
    """Return each agent's part ``(num_envs, agents, …)`` of its group's results."""
    diagonal = part.unflatten(0, (-1, count)).diagonal(dim1=1, dim2=2)
    return diagonal.movedim(-1, 1).contiguous()


def _merge(
    where: Tensor, flat: PerturbationState, state: PerturbationState
) -> PerturbationState:
    """Replace the states of the agents ``where`` by entries of a flat state."""
    merged = dict(state)
    for key, part in flat.items():
        new = part.unflatten(0, where.shape)
        merged[key] = torch.where(like(where, new), new, state.get(key, new))
    return merged
