"""The agents of other people's envs: groups, spaces, and columns of arrays."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError

PARTS = ("features", "types", "padding")
"""The keys of an observation that is already in tokens."""


@dataclass(frozen=True)
class Team:
    """A group of the env's agents.

    Attributes:
        agents: as the env calls them.
        observation: of one of them, a flat Box or a Dict of tokens.
        action: of one of them, a Discrete or a Box of one dimension.
    """

    agents: tuple[Any, ...]
    observation: spaces.Box | spaces.Dict
    action: spaces.Box | spaces.Discrete

    @property
    def action_size(self) -> int:
        """Numbers in the action of one agent."""
        return 1 if isinstance(self.action, spaces.Discrete) else self.action.shape[0]

    def decode(self, actions: np.ndarray) -> list[Any]:
        """From ``(agents, action_size)`` float64 to what the env takes."""
        if isinstance(self.action, spaces.Discrete):
            return [int(action) for action in actions[:, 0]]
        return list(actions.astype(self.action.dtype))


def teams(
    env: ParallelEnv[Any, Any, Any], groups: Mapping[str, Sequence[str]] | None
) -> dict[str, Team]:
    """Group the agents of ``env``.

    Args:
        env: with ``possible_agents``.
        groups: names of agents by group; None for agents of equal spaces whose names
            differ in a trailing number only.

    Raises:
        InputError: agents that are unknown, left out, in two groups or of different
            spaces, or spaces that no policy here can work with.
    """
    agents = list(getattr(env, "possible_agents", ()))
    if not agents:
        raise InputError("env.module: expected an env with possible_agents, got none")
    members = by_name(env, agents) if groups is None else _listed(agents, groups)
    return {name: _team(env, name, those) for name, those in members.items()}


def token_spec(space: spaces.Dict) -> TokenSpec | None:
    """The tokens that a Dict space describes; None if it is not of that form.

    Type 0 is taken for the observer's own token, as everywhere in this package.
    """
    if set(space.keys()) != set(PARTS):
        return None
    boxes = [box for part in PARTS if isinstance(box := space[part], spaces.Box)]
    shape = boxes[0].shape or () if len(boxes) == len(PARTS) else ()
    if len(shape) != 2:
        return None
    features, types, padding = boxes
    count, width = shape
    if types.shape != (count,) or padding.shape != (count,):
        return None
    if not np.issubdtype(types.dtype, np.integer):
        return None
    names = ("self", *(f"type_{i}" for i in range(1, int(types.high.max()) + 1)))
    if features.dtype == np.uint8:
        return TokenSpec(count, width, names, dtype="uint8")
    return TokenSpec(count, width, names)


def by_name(env: ParallelEnv[Any, Any, Any], agents: list[Any]) -> dict[str, list[Any]]:
    """Group agents of equal spaces whose names differ in a trailing number only."""
    kinds: dict[str, list[list[Any]]] = {}
    for agent in agents:
        prefix = re.sub(r"_?\d+$", "", str(agent)) or "agent"
        alike = kinds.setdefault(prefix, [])
        for those in alike:
            if _spaces(env, those[0]) == _spaces(env, agent):
                those.append(agent)
                break
        else:
            alike.append([agent])
    return {
        prefix if len(alike) == 1 else f"{prefix}_{chr(ord('a') + i)}": those
        for prefix, alike in kinds.items()
        for i, those in enumerate(alike)
    }


def _listed(
    agents: list[Any], groups: Mapping[str, Sequence[str]]
) -> dict[str, list[Any]]:
    known = {str(agent): agent for agent in agents}
    seen: dict[str, str] = {}
    for name, those in groups.items():
        if not those:
            raise InputError(f"env.groups: group {name!r} has no agents")
        for agent in those:
            if agent not in known:
                raise InputError(
                    f"env.groups: group {name!r} has the agent {agent!r}; expected "
                    f"some of {', '.join(known)}"
                )
            if agent in seen:
                raise InputError(
                    f"env.groups: agent {agent!r} is in {seen[agent]!r} and {name!r}"
                )
            seen[agent] = name
    left = [agent for agent in known if agent not in seen]
    if left:
        raise InputError(f"env.groups: no group has {', '.join(left)}")
    return {name: [known[agent] for agent in those] for name, those in groups.items()}


def _spaces(env: ParallelEnv[Any, Any, Any], agent: Any) -> tuple[Any, Any]:
    return env.observation_space(agent), env.action_space(agent)


def _team(env: ParallelEnv[Any, Any, Any], name: str, agents: list[Any]) -> Team:
    observation, action = _spaces(env, agents[0])
    for agent in agents[1:]:
        if _spaces(env, agent) != (observation, action):
            raise InputError(
                f"env.groups: agents {agents[0]!r} and {agent!r} of group {name!r} "
                "have different spaces"
            )
    _check_observation(agents[0], observation)
    _check_action(agents[0], action)
    return Team(tuple(agents), observation, action)


def _check_observation(agent: Any, space: Any) -> None:
    flat = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0]
    if flat or (isinstance(space, spaces.Dict) and token_spec(space)):
        return
    raise InputError(
        f"env.module: agent {agent!r}: expected observations in a Box of one dimension "
        f"or a Dict of {', '.join(PARTS)}, got {_line(space)}"
    )


def _check_action(agent: Any, space: Any) -> None:
    try:
        ActionSpec.of(space)
    except InputError as error:
        raise InputError(f"env.module: agent {agent!r}: {_line(error)}") from error
    if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        raise InputError(
            f"env.module: agent {agent!r}: expected actions in a Box of floats, "
            f"got {_line(space)}"
        )


def _line(thing: object) -> str:
    return " ".join(str(thing).split())
