"""Teams of the agents of PettingZoo environments, and arrays of their steps."""

import itertools
import math
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from torch import Tensor

from marl_pool.envs.pettingzoo.env_copy import ParallelStep
from marl_pool.envs.pettingzoo.life import agent_names
from marl_pool.envs.pettingzoo.turn_based import TurnBasedAgents
from marl_pool.observations.make import validate_space
from marl_pool.observations.masks import MASK, read_mask
from marl_pool.observations.view import TokenView
from marl_pool.policies.action_spaces import ActionRows
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.masks import validate_mask_space
from marl_pool.utils.errors import InputError, described
from marl_pool.utils.text import single_line

Arrays = dict[str, np.ndarray]
"""Arrays ``(num_envs, agents, …)`` by name."""
TRUNCATED = "truncated"
"""Name of the tensor ``(num_envs,)`` bool of episodes that reached their limit."""
ALIGNMENT = 64
"""Bytes of a cache line, which two arrays in shared memory do not share."""


@dataclass(frozen=True)
class PettingZooTeam:
    """Agents of equal spaces that one policy controls."""

    agents: tuple[Any, ...]
    """The environment's names of the agents."""
    observation: spaces.Space[Any]
    """Observation space of one agent."""
    action: spaces.Space[Any]
    """Action space of one agent."""
    turn_based: bool = False
    """True if an agent acts in its turns only."""

    @cached_property
    def rows(self) -> ActionRows:
        """The action space as rows of numbers."""
        return ActionRows(self.action)

    @cached_property
    def spec(self) -> ActionSpec:
        """Actions of one agent in a batch, with choices counted from 0."""
        return ActionSpec.of_rows(self.rows)

    @property
    def batched_action(self) -> spaces.Space[Any]:
        """Space of one agent's action in a batch."""
        return self.action if self.rows.counts_from_zero else self.spec.space()

    @property
    def width(self) -> int:
        """Number of entries of a row of `encode`."""
        return math.prod(self.spec.shape) * len(self.agents)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions ``(num_envs, agents, …)`` to rows, clipped to the space."""
        if not self.spec.integral:
            actions = actions.clip(*self.spec.bounds)
        return actions.reshape(len(actions), -1)

    def decode(self, row: np.ndarray) -> dict[Any, Any]:
        """Convert a row of `encode` to the action of each agent."""
        if isinstance(self.action, spaces.Discrete):
            first = int(self.action.start)
            actions: Iterable[Any] = [first + int(option) for option in row]
        elif isinstance(self.action, spaces.Box):
            actions = row.reshape(len(self.agents), -1).astype(self.action.dtype)
        else:
            actions = map(self.rows.restore, row.reshape(len(self.agents), -1))
        return dict(zip(self.agents, actions, strict=True))


def make_teams(
    env: ParallelEnv[Any, Any, Any], groups: Mapping[str, Sequence[str]] | None
) -> dict[str, PettingZooTeam]:
    """Group the agents of an environment; see `PettingZooEnv` for ``groups``.

    Raises:
        InputError: agents that are unknown, missing, in two groups or of different
            spaces, or unsupported spaces.
    """
    agents = agent_names(env)
    members = by_name(env, agents) if groups is None else _listed(agents, groups)
    return {name: _make_team(env, name, names) for name, names in members.items()}


def by_name(env: ParallelEnv[Any, Any, Any], agents: list[Any]) -> dict[str, list[Any]]:
    """Group agents of equal spaces whose names differ in a trailing number only.

    A group is named by what its agents' names share, or "agent" if that is nothing;
    characters that a file's name cannot have become "_". Where agents of one name have
    several spaces, or a name is taken, groups are called NAME_a, NAME_b, ….
    """
    by_prefix: dict[str, list[list[Any]]] = {}
    # Find the group of the same prefix whose members have the same spaces.
    for agent in agents:
        prefix = re.sub(r"_?\d+$", "", str(agent))
        groups = by_prefix.setdefault(prefix, [])
        for members in groups:
            if _spaces(env, members[0]) == _spaces(env, agent):
                members.append(agent)
                break
        else:
            groups.append([agent])
    by_group: dict[str, list[Any]] = {}
    for prefix, groups in by_prefix.items():
        shared = re.sub(r"^\W+|\W+$", "", prefix)
        name = re.sub(r"[^\w.-]+", "_", shared) or "agent"
        is_free = name == prefix or name not in {*by_prefix, *by_group}
        if len(groups) == 1 and is_free:
            by_group[name] = groups[0]
            continue
        for members in groups:
            by_group[next(_suffixed(name, {*by_prefix, *by_group}))] = members
    return by_group


def _suffixed(name: str, used_names: Collection[str]) -> Iterator[str]:
    """Yield NAME_a, …, NAME_z, NAME_aa, … without the names that are taken."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            suffixed = f"{name}_{''.join(letters)}"
            if suffixed not in used_names:
                yield suffixed


def _listed(
    agents: list[Any], groups: Mapping[str, Sequence[str]]
) -> dict[str, list[Any]]:
    by_label = {str(agent): agent for agent in agents}
    listed = [agent for members in groups.values() for agent in members]
    if sorted(listed) != sorted(by_label) or not all(groups.values()):
        raise InputError(
            f"env.groups: expected each agent of {', '.join(by_label)} in one group, "
            f"and no empty group, got {dict(groups)}"
        )
    return {
        name: [by_label[agent] for agent in group] for name, group in groups.items()
    }


def _spaces(env: ParallelEnv[Any, Any, Any], agent: Any) -> tuple[Any, Any]:
    try:
        return env.observation_space(agent), env.action_space(agent)
    except Exception as error:  # third-party code may raise any exception
        raise InputError(
            f"env.module: the spaces of agent {agent!r}: {described(error)}"
        ) from error


def _make_team(
    env: ParallelEnv[Any, Any, Any], name: str, agents: list[Any]
) -> PettingZooTeam:
    first = agents[0]
    observation, action = _spaces(env, first)
    for agent in agents[1:]:
        if _spaces(env, agent) != (observation, action):
            raise InputError(
                f"env.groups: agents {first!r} and {agent!r} of group {name!r} "
                "have different spaces"
            )
    where = f"env.module: agent {first!r}"
    validate_space(observation, where)
    turn_based = isinstance(env, TurnBasedAgents)
    team = PettingZooTeam(tuple(agents), observation, action, turn_based)
    try:
        rows, _ = team.rows, team.spec
    except InputError as error:
        raise InputError(f"{where}: {single_line(error)}") from error
    if not rows.has_float_boxes:
        raise InputError(
            f"{where}: expected actions in a Box of floats, got {single_line(action)}"
        )
    validate_mask_space(observation, action, where)
    return team


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def decode(teams: Mapping[str, PettingZooTeam], row: np.ndarray) -> dict[Any, Any]:
    """Convert the concatenated rows of all teams to agents' actions."""
    by_agent: dict[Any, Any] = {}
    for team in teams.values():
        team_row, row = row[: team.width], row[team.width :]
        by_agent |= team.decode(team_row)
    return by_agent


class StepArrays:
    """Results of one step: arrays ``(num_envs, agents, …)`` by group, 0 if absent.

    Args:
        num_envs: number of environments.
        teams: the teams by group.
        views: views of their observations, by group.
        dtype: NumPy dtype of rewards.
        informed: groups whose action masks are in the infos; there, an agent without
            one may do anything.
    """

    def __init__(
        self,
        num_envs: int,
        teams: Mapping[str, PettingZooTeam],
        views: Mapping[str, TokenView],
        dtype: Any,
        informed: Collection[str] = (),
    ) -> None:
        self.teams, self.views, self.informed = teams, views, informed
        self.rewards: Arrays = {}
        self.parts: dict[str, Arrays] = {}
        """By group: active agents, those alive if they take turns, and the parts of the
        active agents' observations."""
        self._columns: dict[Any, tuple[str, int]] = {}
        self._where = [""] * num_envs
        for name, team in teams.items():
            count = (num_envs, len(team.agents))
            self.rewards[name] = np.zeros(count, dtype)
            active = {"active": np.zeros(count, np.bool_)}
            self.parts[name] = active | views[name].arrays(*count)
            if team.turn_based:
                self.parts[name]["alive"] = np.zeros(count, np.bool_)
            if name in informed:
                shape = (*count, team.spec.num_options)
                self.parts[name][MASK] = np.zeros(shape, np.bool_)
            self._columns |= {agent: (name, i) for i, agent in enumerate(team.agents)}
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer of `share`."""
        return sum(
            _aligned(array.nbytes)
            for _, arrays in self._by_group()
            for array in arrays.values()
        )

    def share(self, buffer: mmap) -> None:
        """Place rewards and observations in a buffer, in the same order everywhere."""
        offset = 0
        for _, arrays in self._by_group():
            for key, array in arrays.items():
                arrays[key] = np.ndarray(array.shape, array.dtype, buffer, offset)
                offset += _aligned(array.nbytes)

    def clear(self, row: int) -> None:
        """Make all agents of one environment absent."""
        for _, arrays in self._by_group():
            for array in arrays.values():
                array[row] = 0

    def copy(
        self, rows: Sequence[int], steps: Sequence[ParallelStep], source: "StepArrays"
    ) -> None:
        """Copy steps that were written at the places ``step.place`` of ``source``."""
        places = [step.place for step in steps]
        for name, arrays in self._by_group():
            written = source.rewards if name is None else source.parts[name]
            for key, array in arrays.items():
                array[rows] = written[key][places]
        for row, step in zip(rows, steps, strict=True):
            self._begin(row, step)

    def _by_group(self) -> Iterator[tuple[str | None, Arrays]]:
        """Yield the rewards, with None, and the observations of each group."""
        yield None, self.rewards
        yield from self.parts.items()

    def _begin(self, row: int, step: ParallelStep) -> None:
        self._where[row] = step.where
        self.terminated[row], self.truncated[row] = step.terminated, step.truncated
        for agent in step.masks:
            if MASK not in self.parts[self._columns[agent][0]]:
                raise InputError(
                    f"{step.where}: agent {agent!r}: infos: {MASK}: expected one after "
                    "the reset too, got none"
                )

    def write(self, row: int, step: ParallelStep) -> None:
        """Write the step of one environment."""
        self._begin(row, step)
        for agent, observation in step.observations.items():
            name, column = self._columns[agent]
            arrays = self.parts[name]
            arrays["active"][row, column] = True
            try:
                self.views[name].write(arrays, (row, column), observation)
                if name in self.informed:
                    mask = step.masks.get(agent)
                    arrays[MASK][row, column] = self._read_mask(name, mask)
            except (InputError, LookupError, TypeError, ValueError) as error:
                problem = str(error).removeprefix("env.module: ")
                raise InputError(f"{step.where}: agent {agent!r}: {problem}") from error
        for agent in step.alive:
            name, column = self._columns[agent]
            self.parts[name]["alive"][row, column] = True
        for agent, reward in step.rewards.items():
            name, column = self._columns[agent]
            self.rewards[name][row, column] = reward

    def _read_mask(self, name: str, mask: Any) -> np.ndarray | bool:
        if mask is None:
            return True
        sizes = self.teams[name].spec.sizes
        return read_mask(mask, sizes, f"infos: {MASK}")

    def tensors(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return active agents and observations, by ``group/part``, and `TRUNCATED`.

        Raises:
            InputError: a number that the space of an observation does not contain, or
                an agent that has to act and has no allowed action.
        """
        self._validate_ranges()
        self._validate_masks()
        tensors = {TRUNCATED: torch.from_numpy(self.truncated).to(device)}
        for name, arrays in self.parts.items():
            for part, array in arrays.items():
                tensor = torch.from_numpy(array).to(device)
                real = tensor.is_floating_point()
                tensors[f"{name}/{part}"] = tensor.to(dtype) if real else tensor
        return tensors

    def _validate_ranges(self) -> None:
        for name, arrays in self.parts.items():
            misfit = self.views[name].misfit(arrays, arrays["active"])
            if misfit is not None:
                raise self._error(name, misfit.place, f": {misfit.message}")

    def _validate_masks(self) -> None:
        for name, arrays in self.parts.items():
            if MASK not in arrays:
                continue
            spec, numbers = self.teams[name].spec, arrays[MASK]
            if not ((numbers == 0) | (numbers == 1)).all():
                place = tuple(np.argwhere((numbers != 0) & (numbers != 1))[0])
                problem = f": {MASK}: expected numbers 0 and 1, got {numbers[place]:g}"
                raise self._error(name, place[:2], problem)
            # Count the allowed options of each choice, which are contiguous.
            firsts = np.cumsum((0, *spec.sizes[:-1]))
            allowed = np.add.reduceat(arrays[MASK] != 0, firsts, -1, np.int64)
            stuck = arrays["active"] & ~allowed.all(-1)
            # Nobody acts after the end of an episode.
            stuck &= ~(self.terminated | self.truncated)[:, None]
            if stuck.any():
                place = tuple(np.argwhere(stuck)[0])
                number = int(allowed[place].argmin())
                choice = "" if spec.discrete else f" of choice {number}"
                problem = f"expected at least one allowed action{choice}, got none"
                raise self._error(name, place, f" of group {name!r}: {MASK}: {problem}")

    def _error(self, name: str, place: Sequence[int], problem: str) -> InputError:
        row, column = place
        agent = self.teams[name].agents[column]
        return InputError(f"{self._where[row]}: agent {agent!r}{problem}")
