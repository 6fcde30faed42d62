"""Teams of the agents of PettingZoo environments, and what they observe as tokens."""

import itertools
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.pettingzoo.env_copy import ParallelStep
from marl_pool.envs.tokenizers.base import Tokenizer
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, described

PARTS = ("features", "types", "padding")
"""Keys of an observation that consists of tokens."""
Arrays = dict[str, np.ndarray]
"""Arrays ``(num_envs, agents, …)`` by name."""


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
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise InputError("env.module: expected an env with possible_agents, got none")
    if len({*map(str, agents)}) < len(agents):
        raise InputError(
            f"env.module: expected possible_agents of different names, got {agents}"
        )
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
    """Group agents of equal spaces whose names differ in a trailing number only.

    A group is called by what its agents' names share, or "agent" if that is nothing;
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
    named: dict[str, list[Any]] = {}
    for prefix, groups in by_prefix.items():
        shared = re.sub(r"^\W+|\W+$", "", prefix)
        name = re.sub(r"[^\w.-]+", "_", shared) or "agent"
        is_free = name == prefix or name not in {*by_prefix, *named}
        if len(groups) == 1 and is_free:
            named[name] = groups[0]
            continue
        for members in groups:
            named[next(_suffixed(name, {*by_prefix, *named}))] = members
    return named


def _suffixed(name: str, taken: Collection[str]) -> Iterator[str]:
    """Yield NAME_a, …, NAME_z, NAME_aa, … without the names that are taken."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            suffixed = f"{name}_{''.join(letters)}"
            if suffixed not in taken:
                yield suffixed


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


class ObservationAdapter:
    """Stores one team's observations in arrays, and converts them to tokens.

    This one is for observations that are tokens; uint8 features stay uint8.
    """

    parts: dict[str, tuple[tuple[int, ...], Any]]
    """Shape and dtype of each part of an observation, by name."""

    def __init__(self, spec: TokenSpec, dtype: Any) -> None:
        self.spec = spec
        kept = np.uint8 if spec.dtype == "uint8" else dtype
        self.parts = {
            "features": ((spec.num_tokens, spec.num_features), kept),
            "types": ((spec.num_tokens,), np.int64),
            "padding": ((spec.num_tokens,), np.bool_),
        }

    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        """Write the observation of one agent."""
        for name in self.parts:
            arrays[name][row, agent] = observation[name]

    def tokens(self, parts: Mapping[str, Tensor]) -> Tokens:
        """Convert all observations to tokens ``(num_envs, agents, N)``."""
        return Tokens(**parts)


class FlatAdapter(ObservationAdapter):
    """Flat observations, converted by a tokenizer in one call for all agents.

    Raises:
        InputError: the tokenizer ``name`` does not fit the observations.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, dtype: Any) -> None:
        super().__init__(tokenizer.spec, dtype)
        self.tokenizer = tokenizer
        self.parts = {"numbers": ((tokenizer.observer.size,), dtype)}
        self._validate(name)

    @override
    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        # Checked here, because numpy would broadcast a single number.
        numbers, expected = np.asarray(observation), self.parts["numbers"][0]
        if numbers.shape != expected:
            raise InputError(
                f"env.module: expected an observation of shape {expected}, as in its "
                f"space, got {numbers.shape}"
            )
        arrays["numbers"][row, agent] = numbers

    @override
    def tokens(self, parts: Mapping[str, Tensor]) -> Tokens:
        numbers = parts["numbers"]
        tokens = self.tokenizer(numbers.flatten(0, 1))
        return tokens.map(lambda part: part.unflatten(0, numbers.shape[:2]))

    def _validate(self, name: str) -> None:
        # Try the tokenizer on zeros, so that a misfit is found before training.
        observer, spec = self.tokenizer.observer, self.spec
        where = f"env.tokenizer: {name} does not fit observations of {observer.size} "
        where += "numbers"
        try:
            zeros = torch.zeros(2, observer.size, device=observer.device)
            tokens = self.tokenizer(zeros)
        except (RuntimeError, LookupError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(f"{where}: {first}") from error
        # Compare shapes and types with the spec.
        shape = (2, spec.num_tokens)
        for part, tensor, wanted, dtype in (
            ("features", tokens.features, (*shape, spec.num_features), None),
            ("types", tokens.types, shape, torch.int64),
            ("padding", tokens.padding, shape, torch.bool),
        ):
            if tensor.shape != wanted or dtype not in (None, tensor.dtype):
                raise InputError(
                    f"{where}: expected {part} of shape {wanted}"
                    f"{f' and {dtype}' if dtype else ''}, got {tuple(tensor.shape)} "
                    f"and {tensor.dtype}"
                )
        highest = int(tokens.types.max())
        if not 0 <= int(tokens.types.min()) <= highest < spec.num_types:
            raise InputError(
                f"{where}: expected types below {spec.num_types}, got {highest}"
            )


class StepArrays:
    """Results of one step: arrays ``(num_envs, agents, …)`` by group, 0 if absent."""

    def __init__(
        self,
        num_envs: int,
        teams: Mapping[str, PettingZooTeam],
        adapters: Mapping[str, ObservationAdapter],
        dtype: Any,
    ) -> None:
        self.adapters = adapters
        self.rewards: Arrays = {}
        self.parts: dict[str, Arrays] = {}
        """By group: active agents, and the parts of their observations."""
        self._columns: dict[Any, tuple[str, int]] = {}
        for name, team in teams.items():
            count = (num_envs, len(team.agents))
            self.rewards[name] = np.zeros(count, dtype)
            self.parts[name] = {"active": np.zeros(count, np.bool_)}
            for part, (shape, kind) in adapters[name].parts.items():
                self.parts[name][part] = np.zeros((*count, *shape), kind)
            self._columns |= {agent: (name, i) for i, agent in enumerate(team.agents)}
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)

    def write(self, row: int, step: ParallelStep) -> None:
        """Write the step of one environment."""
        self.terminated[row], self.truncated[row] = step.terminated, step.truncated
        for agent, observation in step.observations.items():
            name, column = self._columns[agent]
            arrays = self.parts[name]
            arrays["active"][row, column] = True
            try:
                self.adapters[name].write(arrays, row, column, observation)
            except (InputError, LookupError, TypeError, ValueError) as error:
                problem = str(error).removeprefix("env.module: ")
                raise InputError(f"{step.where}: agent {agent!r}: {problem}") from error
        for agent, reward in step.rewards.items():
            name, column = self._columns[agent]
            self.rewards[name][row, column] = reward

    def tensors(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return active agents and observations, by ``group/part``."""
        tensors = {}
        for name, arrays in self.parts.items():
            for part, array in arrays.items():
                tensor = torch.from_numpy(array).to(device)
                real = tensor.is_floating_point()
                tensors[f"{name}/{part}"] = tensor.to(dtype) if real else tensor
        return tensors
