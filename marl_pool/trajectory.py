"""Steps and episodes of a rollout, and operations on the rows of pytrees."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.envs.base import BatchedEnv, Step
from marl_pool.policies.base import Decision, State
from marl_pool.tokens import Tokens, like


class Transition(NamedTuple):
    """One step of all environments; dictionaries are by group of agents."""

    env: BatchedEnv
    """The environments after the step."""
    tokens: dict[str, Tokens]
    """Observations of the policies before the step, perturbed."""
    states: dict[str, State]
    """States of the policies before the step."""
    decisions: dict[str, Decision]
    """Decisions of the policies, with the next states."""
    step: Step
    """Rewards and ends of episodes."""
    actions: dict[str, Tensor]
    """Actions of the policies in units of the action space; a token that was selected
    has its place in the environment's observation."""
    executed: dict[str, Tensor]
    """Actions that the environments took: ``actions``, perturbed."""


class Trajectory(NamedTuple):
    """Steps of one group of agents; leading dimensions ``(T, num_envs, agents)``.

    A row may hold the end of one episode and the start of the next.

    Attributes:
        tokens: observations of the policy.
        actions: in the units of the policy; see `Policy.scale`.
        log_probs: log-probabilities of the actions.
        logits: parameters of the action distributions, ``(…, L)``.
        values: estimated returns of the observations.
        next_values: estimated returns of the observations after the steps, including
            those at the end of an episode or of the fragment. Undefined after a
            termination.
        rewards: rewards of the steps.
        terminated: ``(T, num_envs)`` bool, the episode ended in a terminal state.
        truncated: ``(T, num_envs)`` bool, the episode reached its time limit.
        active: bool, the agent acted; otherwise it was dead or it was not its turn.
        next_active: bool, the same for the next step.
        states: states of the policy when it acted, a pytree; () without a memory.
        next_alive: bool, the agent was alive after the step; None where all living
            agents act in all steps.
        alive: bool, the agent was alive before the step; None where the environment
            does not distinguish it from ``active``.
        critic_tokens: what the critic read; None if that is ``tokens``.
        team: ``(T, num_envs, 1, agents)`` bool, the agents that acted, if the agents
            of a team are joined; else None.
    """

    tokens: Tokens
    actions: Tensor
    log_probs: Tensor
    logits: Tensor
    values: Tensor
    next_values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    active: Tensor
    next_active: Tensor
    states: State = ()
    next_alive: Tensor | None = None
    alive: Tensor | None = None
    critic_tokens: Tokens | None = None
    team: Tensor | None = None


class Episodes(NamedTuple):
    """Returns and lengths of finished episodes."""

    returns: dict[str, Tensor]
    """For each group ``(episodes, agents)`` float64, undiscounted."""
    lengths: Tensor
    """``(episodes,)`` int64, steps."""
    attended: dict[str, Tensor]
    """For each group ``(episodes, agents)`` bool: agents that were ever alive."""

    def means(self) -> dict[str, Tensor]:
        """Return for each group ``(episodes,)``, the means over agents that attended.

        The mean is 0 where none attended.
        """
        return {
            name: returns.sum(1) / self.attended[name].sum(1).clamp(min=1)
            for name, returns in self.returns.items()
        }


class Ending(NamedTuple):
    """All environments after a step that ended episodes in some, before the reset."""

    time: int
    """Step of the fragment, from 0."""
    ended: Tensor
    """``(num_envs,)`` bool."""
    tokens: dict[str, Tokens]
    critic_tokens: dict[str, Tokens]
    states: dict[str, State]
    returns: dict[str, Tensor]
    lengths: Tensor
    attended: dict[str, Tensor]


class FinalObservation(NamedTuple):
    """Observation after the last step of an episode or fragment; no action follows it.

    Its value completes `Trajectory.next_values`. Tokens and states, by group, have the
    batch dimensions ``(rows, agents)``.
    """

    time: int
    rows: Tensor
    """``(rows,)`` int64, the environments concerned."""
    tokens: dict[str, Tokens]
    critic_tokens: dict[str, Tokens]
    states: dict[str, State]


Fragment = tuple[list[dict[str, Trajectory]], list[Ending]]
"""Steps by group, and the ends of episodes in between."""


def choose_rows(where: Tensor | None, new: Any, old: Any) -> Any:
    """Select the rows ``where`` (None: all) of ``new``, and the others of ``old``."""
    if where is None:
        return new
    return _map(lambda a, b: torch.where(like(where, a), a, b), new, old)


def index_rows(tree: Any, rows: Tensor) -> Any:
    """Index the leading dimension of every tensor of a pytree."""
    return _map(lambda tensor: tensor[rows], tree)


def stack_steps(parts: tuple[Any, ...]) -> Any:
    """Stack the steps of a tensor, of tokens or of another pytree."""
    if isinstance(parts[0], Tensor):
        return torch.stack(parts)
    if parts[0] is None:
        return None
    if isinstance(parts[0], Tokens):
        return Tokens(
            *map(torch.stack, zip(*(part.parts for part in parts), strict=True))
        )
    return tree_map(lambda *leaves: torch.stack(leaves), *parts)


def concatenate_rows(trees: list[Any]) -> Any:
    """Concatenate pytrees of tensors along the leading dimension."""
    return _map(lambda *parts: torch.cat(parts), *trees)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """Apply ``function`` to the tensors of pytrees; an absent mask stays None."""
    return tree_map(
        lambda *leaves: None if leaves[0] is None else function(*leaves), *trees
    )
