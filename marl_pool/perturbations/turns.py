"""Perturbations of a group of agents, which act in every step or in their own turns."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import (
    ActionSpace,
    Perturbation,
    PerturbationState,
    choose,
    validate_constructed,
    validate_perturbed,
)
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import Tokens, form_of, like
from marl_pool.utils.devices import may_read
from marl_pool.utils.errors import InputError, UnfitTokensError

if TYPE_CHECKING:
    from marl_pool.envs.base import BatchedEnv
    from marl_pool.envs.description import EnvDescription

_BEGUN = "begun"
"""Entry of a state: ``(num_envs, agents)`` bool, the agent has had a turn."""


def validate_fits(
    perturbation: Perturbation, env: "BatchedEnv | EnvDescription"
) -> None:
    """Raise UnfitTokensError if a perturbation's options do not fit an environment."""
    validate_constructed(perturbation)
    counts = {name: group.num_agents for name, group in env.groups.items()}
    validate_groups(perturbation, counts, steps_of_agents(env))


def steps_of_agents(env: "BatchedEnv | EnvDescription") -> int:
    """Return the largest number of an agent's steps in an episode, with equal turns."""
    agents = sum(group.num_agents for group in env.groups.values())
    return math.ceil(env.max_steps / (agents if env.turn_based else 1))


def validate_groups(
    perturbation: Perturbation, counts: Mapping[str, int], max_steps: int | None
) -> None:
    """Reject groups of agents that a perturbation was not made for.

    Arguments and errors are those of `Perturbation.validate_env`.
    """
    if unknown := perturbation.made_for - set(counts):
        raise UnfitTokensError(
            f"perturbation: expected specs of some of the groups {', '.join(counts)}, "
            f"got {', '.join(sorted(unknown))}"
        )
    perturbation.validate_env(counts, max_steps)


Change = Callable[[Tokens, PerturbationState], PerturbationState]
"""A new state of a perturbation, from the unperturbed tokens and the state."""


class EveryStep:
    """A perturbation of a group of agents that all act in every step.

    Agents that select tokens select among those that they perceive.

    Args:
        perturbation: the perturbation of the group.
        acting: returns ``(num_envs, agents)`` bool, the agents that act in this step.
        streams: returns the ``keys`` and ``episodes`` of `Perturbation.start`, of this
            step's episodes.
        selection: the tokens among which agents select; None if they do not.
    """

    def __init__(
        self,
        perturbation: Perturbation,
        acting: Callable[[], Tensor],
        streams: Callable[[], tuple[Tensor, Tensor]],
        selection: SelectedTokens | None = None,
    ) -> None:
        self.perturbation = perturbation
        self.acting, self.streams, self.selection = acting, streams, selection

    def start(
        self,
        tokens: Tokens,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
    ) -> PerturbationState:
        """Return the state at the start of an episode; see `Perturbation.start`."""
        keys, episodes = self.streams()
        return self.perturbation.start(tokens, keys, state, where, episodes)

    def perceive(
        self, tokens: Tokens, state: PerturbationState, where: Tensor | None = None
    ) -> tuple[Tokens, PerturbationState]:
        """Perturb the tokens of one step; return them and the next state.

        Args:
            tokens: of batch ``(num_envs, agents)``.
            state: from `start` or an earlier call.
            where: ``(num_envs,)`` bool, environments whose state advances; None for
                all. The tokens of the others are not to be used.
        """
        perturbed, after = self._perturb(tokens, state, where)
        if self.selection is not None and tokens.action_mask is not None:
            origin = self.origin(perturbed, after, tokens.num_tokens)
            perturbed = self.selection.perceive(perturbed, origin)
        return perturbed, after

    def act(
        self,
        actions: Tensor,
        state: PerturbationState,
        space: ActionSpace,
        perceived: Tokens,
    ) -> tuple[Tensor, PerturbationState]:
        """Perturb actions, chosen from ``perceived``; see `Perturbation.act`."""
        return self.disturb(self.select(actions, state, perceived), state, space)

    def select(
        self, actions: Tensor, state: PerturbationState, perceived: Tokens
    ) -> Tensor:
        """Return the environment's options for actions chosen from ``perceived``.

        Only agents that select tokens have others; see `SelectedTokens.execute`.
        """
        if self.selection is None:
            return actions
        origin = self.origin(perceived, state, self.selection.spec.num_tokens)
        return self.selection.execute(actions, origin, perceived)

    def disturb(
        self, actions: Tensor, state: PerturbationState, space: ActionSpace
    ) -> tuple[Tensor, PerturbationState]:
        """Perturb actions from `select`; see `Perturbation.act`."""
        return self.perturbation.act(actions, state, space)

    def origin(
        self, perturbed: Tokens, state: PerturbationState, num_tokens: int
    ) -> Tensor:
        """Return where the tokens of a step come from; see `Perturbation.origin`."""
        return self.perturbation.origin(perturbed, state, num_tokens)

    def state_of(self, state: PerturbationState, agent: int) -> PerturbationState:
        """Return the state of the whole group that applies to an agent."""
        return state

    def changed(
        self, tokens: Tokens, state: PerturbationState, change: Change
    ) -> PerturbationState:
        """Return a changed state, given the unperturbed tokens of the step."""
        return change(tokens, state)

    def _perturb(
        self, tokens: Tokens, state: PerturbationState, where: Tensor | None
    ) -> tuple[Tokens, PerturbationState]:
        perturbed, after = _perceive(self.perturbation, tokens, state)
        return perturbed, after if where is None else choose(where, after, state)


class OwnTurns(EveryStep):
    """A perturbation that sees each agent only in the turns in which it acts.

    In the turns of others an agent observes padding, which no delay, frozen reading or
    choice of tokens may remember. So each agent has a separate state of the
    perturbation of its whole group. The state starts at the agent's first turn and is
    unchanged in the turns of others, like a policy's, and only the agent's part of the
    results is used: the same tokens, with the same random numbers, as if there were no
    other turns.

    The tensors of a state, ``(num_envs, agents, …)``, hold the states of all agents.
    """

    @override
    def start(
        self,
        tokens: Tokens,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
    ) -> PerturbationState:
        if state is None or where is None:
            return {_BEGUN: torch.zeros_like(self.acting())}
        return {**state, _BEGUN: state[_BEGUN] & ~where[:, None]}

    @override
    def _perturb(
        self, tokens: Tokens, state: PerturbationState, where: Tensor | None
    ) -> tuple[Tokens, PerturbationState]:
        acting = self.acting()
        if where is not None:
            acting = acting & where[:, None]
        count = acting.shape[1]
        groups = _repeat(tokens, count)
        first = acting & ~state[_BEGUN]
        is_new = len(state) == 1
        if is_new or not may_read(first) or first.any():
            keys, episodes = (part.repeat_interleave(count) for part in self.streams())
            started = self.perturbation.start(groups, keys, episodes=episodes)
            state = _merge(first, started, state)
        perturbed, after = _perceive(self.perturbation, groups, _flatten(state))
        state = {**_merge(acting, after, state), _BEGUN: state[_BEGUN] | acting}
        return perturbed.map(lambda part: _of_each_agent(part, count)), state

    @override
    def disturb(
        self, actions: Tensor, state: PerturbationState, space: ActionSpace
    ) -> tuple[Tensor, PerturbationState]:
        acting = self.acting()
        count = acting.shape[1]
        groups = actions.repeat_interleave(count, 0)
        changed, after = self.perturbation.act(groups, _flatten(state), space)
        return _of_each_agent(changed, count), _merge(acting, after, state)

    @override
    def origin(
        self, perturbed: Tokens, state: PerturbationState, num_tokens: int
    ) -> Tensor:
        count = perturbed.types.shape[1]
        groups = _repeat(perturbed, count)
        origin = self.perturbation.origin(groups, _flatten(state), num_tokens)
        return _of_each_agent(origin, count)

    @override
    def state_of(self, state: PerturbationState, agent: int) -> PerturbationState:
        return {key: part[:, agent] for key, part in state.items() if key != _BEGUN}

    @override
    def changed(
        self, tokens: Tokens, state: PerturbationState, change: Change
    ) -> PerturbationState:
        batch = state[_BEGUN].shape
        changed = change(_repeat(tokens, batch[1]), _flatten(state))
        new = {key: part.unflatten(0, batch) for key, part in changed.items()}
        return {**new, _BEGUN: state[_BEGUN]}


def _perceive(
    perturbation: Perturbation, tokens: Tokens, state: PerturbationState
) -> tuple[Tokens, PerturbationState]:
    """Perturb the tokens of one step, and check the form of the result."""
    result: object = perturbation(tokens, state)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise InputError(
            f"perturbation {type(perturbation).__name__!r}: expected (Tokens, state), "
            f"got {form_of(result)}"
        )
    validate_perturbed(perturbation, tokens, result[0])
    return result


def _repeat(tokens: Tokens, count: int) -> Tokens:
    """Repeat the tokens of a group for each of its agents."""
    return tokens.map(lambda part: part.repeat_interleave(count, 0))


def _flatten(state: PerturbationState) -> PerturbationState:
    """Return the states of all agents as one of a batch ``(num_envs · agents, …)``."""
    return {key: part.flatten(0, 1) for key, part in state.items() if key != _BEGUN}


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
