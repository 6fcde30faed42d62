"""Adapters from the observations of PettingZoo environments to batched tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.pettingzoo.agents import PettingZooTeam, token_spec
from marl_pool.envs.tokenizers.base import Tokenizer
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

Arrays = dict[str, np.ndarray]
"""Parts of a team's observations, each ``(num_envs, agents, …)``."""


class ObservationAdapter(ABC):
    """Stores one team's observations in arrays, and converts them to tokens.

    Attributes:
        spec: spec of the tokens.
        parts: shape and dtype of each part of an observation, by name.
    """

    spec: TokenSpec
    parts: dict[str, tuple[tuple[int, ...], Any]]

    def zeros(self, num_envs: int, agents: int) -> Arrays:
        """Return arrays of zeros, which absent agents keep."""
        return {
            name: np.zeros((num_envs, agents, *shape), dtype)
            for name, (shape, dtype) in self.parts.items()
        }

    @abstractmethod
    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        """Write the observation of one agent."""

    @abstractmethod
    def tokens(self, parts: Mapping[str, Tensor]) -> Tokens:
        """Convert all observations to tokens ``(num_envs, agents, N)``."""


class FlatAdapter(ObservationAdapter):
    """Flat observations, converted by a tokenizer in one call for all agents.

    Args:
        tokenizer: tokenizer of the team.
        name: name of the tokenizer, for messages.
        dtype: dtype of the stored observations.

    Raises:
        InputError: the tokenizer does not fit the observations.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, dtype: Any) -> None:
        self.tokenizer, self.spec = tokenizer, tokenizer.spec
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
        size, device = self.tokenizer.observer.size, self.tokenizer.observer.device
        where = f"env.tokenizer: {name} does not fit observations of {size} numbers"
        try:
            tokens = self.tokenizer(torch.zeros(2, size, device=device))
        except (RuntimeError, LookupError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(f"{where}: {first}") from error
        spec = self.spec
        expected = {
            "features": ((2, spec.num_tokens, spec.num_features), None),
            "types": ((2, spec.num_tokens), torch.int64),
            "padding": ((2, spec.num_tokens), torch.bool),
        }
        for part, tensor in tokens._asdict().items():
            shape, dtype = expected[part]
            if tensor.shape != shape or tensor.dtype != (dtype or tensor.dtype):
                raise InputError(
                    f"{where}: expected {part} of shape {shape}"
                    f"{f' and {dtype}' if dtype else ''}, got {tuple(tensor.shape)} "
                    f"and {tensor.dtype}"
                )
        highest = int(tokens.types.max())
        if not 0 <= int(tokens.types.min()) <= highest < spec.num_types:
            raise InputError(
                f"{where}: expected types below {spec.num_types}, got {highest}"
            )


class TokenAdapter(ObservationAdapter):
    """Observations that are tokens.

    Args:
        space: space of one observation.
        dtype: dtype of stored features; uint8 features stay uint8.
    """

    def __init__(self, space: spaces.Dict, dtype: Any) -> None:
        spec = token_spec(space)
        assert spec is not None
        self.spec = spec
        kept = np.uint8 if spec.dtype == "uint8" else dtype
        self.parts = {
            "features": ((spec.num_tokens, spec.num_features), kept),
            "types": ((spec.num_tokens,), np.int64),
            "padding": ((spec.num_tokens,), np.bool_),
        }

    @override
    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        for name, array in arrays.items():
            array[row, agent] = observation[name]

    @override
    def tokens(self, parts: Mapping[str, Tensor]) -> Tokens:
        return Tokens(parts["features"], parts["types"], parts["padding"])


def make_adapter(
    team: PettingZooTeam, tokenizer: Tokenizer | None, name: str, dtype: Any
) -> ObservationAdapter:
    """Build the adapter of a team; a Dict of tokens needs no tokenizer."""
    if tokenizer is None:
        assert isinstance(team.observation, spaces.Dict)
        return TokenAdapter(team.observation, dtype)
    return FlatAdapter(tokenizer, name, dtype)
