"""Steps of several PettingZoo environments as arrays, and observations as tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.pettingzoo.agents import PettingZooTeam
from marl_pool.envs.pettingzoo.env_copy import ParallelStep
from marl_pool.envs.tokenizers.base import Tokenizer
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

Arrays = dict[str, np.ndarray]
"""Arrays ``(num_envs, agents, …)`` by name."""


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
        # Agents that remain, unless they ended in this step.
        ended, late = step.terminations, step.truncations
        active = [a for a in step.agents if not (ended.get(a) or late.get(a))]
        # When the last agents leave, those that are truncated stay active, so that
        # their values are bootstrapped.
        timed_out = [a for a in step.acted if late.get(a) and not ended.get(a)]
        self.terminated[row] = not active and not timed_out
        self.truncated[row] = not active and bool(timed_out)
        # Write observations of the living, then rewards of all that acted.
        for agent in active or timed_out:
            name, column = self._column(agent)
            if agent not in step.observations:
                raise InputError(
                    f"env.module: expected an observation of agent {agent!r}, got none"
                )
            arrays, observation = self.parts[name], step.observations[agent]
            arrays["active"][row, column] = True
            self.adapters[name].write(arrays, row, column, observation)
        for agent in step.acted:
            name, column = self._column(agent)
            self.rewards[name][row, column] = step.rewards.get(agent, 0.0)

    def tensors(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return active agents and observations, by ``group/part``."""
        tensors = {}
        for name, arrays in self.parts.items():
            for part, array in arrays.items():
                tensor = torch.from_numpy(array).to(device)
                real = tensor.is_floating_point()
                tensors[f"{name}/{part}"] = tensor.to(dtype) if real else tensor
        return tensors

    def _column(self, agent: Any) -> tuple[str, int]:
        if agent not in self._columns:
            raise InputError(
                f"env.module: expected one of possible_agents, got agent {agent!r}"
            )
        return self._columns[agent]
