"""Groups of the agents of PettingZoo environments, by their spaces."""

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
"""Keys of an observation that consists of tokens."""


@dataclass(frozen=True)
class PettingZooTeam:
    """Agents of equal spaces that one policy controls.

    Attributes:
        agents: the environment's names of the agents.
        observation: space of one agent, a flat Box or a Dict of `PARTS`.
        action: space of one agent, a Discrete or a Box of one dimension.
    """

    agents: tuple[Any, ...]
    observation: spaces.Box | spaces.Dict
    action: spaces.Box | spaces.Discrete

    @property
    def action_size(self) -> int:
        """Number of entries of one agent's action."""
        return 1 if isinstance(self.action, spaces.Discrete) else self.action.shape[0]

    def decode(self, actions: np.ndarray) -> list[Any]:
        """Convert actions ``(agents, action_size)`` float64 to members of the space."""
        if isinstance(self.action, spaces.Discrete):
            return [int(action) for action in actions[:, 0]]
        return list(actions.astype(self.action.dtype))


def make_teams(
    env: ParallelEnv[Any, Any, Any], groups: Mapping[str, Sequence[str]] | None
) -> dict[str, PettingZooTeam]:
    """Group the agents of an environment.

    Args:
        env: an environment with ``possible_agents``.
        groups: names of agents by group; None groups agents of equal spaces whose names
            differ in a trailing number only.

    Raises:
        InputError: agents that are unknown, missing, in two groups or of different
            spaces, or unsupported spaces.
    """
    agents = list(getattr(env, "possible_agents", ()))
    if not agents:
        raise InputError("env.module: expected an env with possible_agents, got none")
    members = by_name(env, agents) if groups is None else _listed(agents, groups)
    return {name: _make_team(env, name, names) for name, names in members.items()}


def token_spec(space: spaces.Dict) -> TokenSpec | None:
    """Return the spec of a Dict of `PARTS`; None for another space.

    Type 0 is the observer's own token, as everywhere in this package.
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
    by_prefix: dict[str, list[list[Any]]] = {}
    for agent in agents:
        prefix = re.sub(r"_?\d+$", "", str(agent)) or "agent"
        groups = by_prefix.setdefault(prefix, [])
        for members in groups:
            if _spaces(env, members[0]) == _spaces(env, agent):
                members.append(agent)
                break
        else:
            groups.append([agent])
    # Agents of one name and several spaces become the groups NAME_a, NAME_b, …
    return {
        prefix if len(groups) == 1 else f"{prefix}_{chr(ord('a') + i)}": members
        for prefix, groups in by_prefix.items()
        for i, members in enumerate(groups)
    }


def _listed(
    agents: list[Any], groups: Mapping[str, Sequence[str]]
) -> dict[str, list[Any]]:
    known = {str(agent): agent for agent in agents}
    seen: dict[str, str] = {}
    for name, members in groups.items():
        if not members:
            raise InputError(f"env.groups: group {name!r} has no agents")
        for agent in members:
            if agent not in known:
                raise InputError(
                    f"env.groups: expected agents of {', '.join(known)}, got {agent!r} "
                    f"in group {name!r}"
                )
            if agent in seen:
                raise InputError(
                    f"env.groups: agent {agent!r} is in {seen[agent]!r} and {name!r}"
                )
            seen[agent] = name
    missing = [agent for agent in known if agent not in seen]
    if missing:
        raise InputError(f"env.groups: no group has {', '.join(missing)}")
    return {
        name: [known[agent] for agent in members] for name, members in groups.items()
    }


def _spaces(env: ParallelEnv[Any, Any, Any], agent: Any) -> tuple[Any, Any]:
    return env.observation_space(agent), env.action_space(agent)


def _make_team(
    env: ParallelEnv[Any, Any, Any], name: str, agents: list[Any]
) -> PettingZooTeam:
    observation, action = _spaces(env, agents[0])
    for agent in agents[1:]:
        if _spaces(env, agent) != (observation, action):
            raise InputError(
                f"env.groups: agents {agents[0]!r} and {agent!r} of group {name!r} "
                "have different spaces"
            )
    _check_observation(agents[0], observation)
    _check_action(agents[0], action)
    return PettingZooTeam(tuple(agents), observation, action)


def _check_observation(agent: Any, space: Any) -> None:
    flat = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0]
    if flat or (isinstance(space, spaces.Dict) and token_spec(space)):
        return
    raise InputError(
        f"env.module: agent {agent!r}: expected observations in a Box of one dimension "
        f"or a Dict of {', '.join(PARTS)}, got {_one_line(space)}"
    )


def _check_action(agent: Any, space: Any) -> None:
    try:
        ActionSpec.of(space)
    except InputError as error:
        raise InputError(f"env.module: agent {agent!r}: {_one_line(error)}") from error
    if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        raise InputError(
            f"env.module: agent {agent!r}: expected actions in a Box of floats, "
            f"got {_one_line(space)}"
        )


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
