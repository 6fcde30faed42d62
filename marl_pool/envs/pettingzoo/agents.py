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
    """Agents of equal spaces that one policy controls."""

    agents: tuple[Any, ...]
    """The environment's names of the agents."""
    observation: spaces.Box | spaces.Dict
    """Space of one agent, a flat Box or a Dict of `PARTS`."""
    action: spaces.Box | spaces.Discrete

    @property
    def width(self) -> int:
        """Number of entries of a row of `encode`."""
        size = 1 if isinstance(self.action, spaces.Discrete) else self.action.shape[0]
        return size * len(self.agents)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions ``(num_envs, agents, …)`` to rows, clipped to the space."""
        if isinstance(self.action, spaces.Box):
            actions = actions.clip(self.action.low, self.action.high)
        return actions.reshape(len(actions), -1)

    def decode(self, row: np.ndarray) -> dict[Any, Any]:
        """Convert a row of `encode` to the action of each agent."""
        if isinstance(self.action, spaces.Discrete):
            return dict(zip(self.agents, map(int, row), strict=True))
        actions = row.reshape(len(self.agents), -1).astype(self.action.dtype)
        return dict(zip(self.agents, actions, strict=True))


def make_teams(
    env: ParallelEnv[Any, Any, Any], groups: Mapping[str, Sequence[str]] | None
) -> dict[str, PettingZooTeam]:
    """Group the agents of an environment; see `PettingZooEnv` for ``groups``.

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
    # All three parts must be boxes whose shapes agree.
    boxes = [box for part in PARTS if isinstance(box := space[part], spaces.Box)]
    shape = boxes[0].shape or () if len(boxes) == len(PARTS) else ()
    if len(shape) != 2:
        return None
    features, types, padding = boxes
    count, width = shape
    fits = types.shape == padding.shape == (count,)
    if not (fits and np.issubdtype(types.dtype, np.integer)):
        return None
    # The space bounds the types, but does not name them.
    names = ("self", *(f"type_{i}" for i in range(1, int(types.high.max()) + 1)))
    return TokenSpec(
        count, width, names, dtype="uint8" if features.dtype == np.uint8 else "float32"
    )


def by_name(env: ParallelEnv[Any, Any, Any], agents: list[Any]) -> dict[str, list[Any]]:
    """Group agents of equal spaces whose names differ in a trailing number only."""
    by_prefix: dict[str, list[list[Any]]] = {}
    # Find the group of the same prefix whose members have the same spaces.
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
    listed = [agent for members in groups.values() for agent in members]
    if sorted(listed) != sorted(known) or not all(groups.values()):
        raise InputError(
            f"env.groups: expected each agent of {', '.join(known)} in one group, and "
            f"no empty group, got {dict(groups)}"
        )
    return {name: [known[agent] for agent in group] for name, group in groups.items()}


def _spaces(env: ParallelEnv[Any, Any, Any], agent: Any) -> tuple[Any, Any]:
    return env.observation_space(agent), env.action_space(agent)


def _make_team(
    env: ParallelEnv[Any, Any, Any], name: str, agents: list[Any]
) -> PettingZooTeam:
    first = agents[0]
    observation, action = _spaces(env, first)
    # All agents of a group need the same spaces.
    for agent in agents[1:]:
        if _spaces(env, agent) != (observation, action):
            raise InputError(
                f"env.groups: agents {first!r} and {agent!r} of group {name!r} "
                "have different spaces"
            )
    where = f"env.module: agent {first!r}:"
    # Observations are vectors, which a tokenizer splits, or tokens already.
    if isinstance(observation, spaces.Box):
        readable = len(observation.shape) == 1 and observation.shape[0] > 0
    else:
        tokens = isinstance(observation, spaces.Dict)
        readable = tokens and token_spec(observation) is not None
    if not readable:
        raise InputError(
            f"{where} expected observations in a Box of one dimension or a Dict of "
            f"{', '.join(PARTS)}, got {_one_line(observation)}"
        )
    # Actions must be discrete or boxes of floats.
    try:
        ActionSpec.of(action)
    except InputError as error:
        raise InputError(f"{where} {_one_line(error)}") from error
    if isinstance(action, spaces.Box) and not np.issubdtype(action.dtype, np.floating):
        raise InputError(
            f"{where} expected actions in a Box of floats, got {_one_line(action)}"
        )
    return PettingZooTeam(tuple(agents), observation, action)


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
