"""From what other people's envs show to tokens, for a whole batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.pettingzoo.agents import Team, token_spec
from marl_pool.envs.tokenizers.base import Tokenizer
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

Arrays = dict[str, np.ndarray]
"""The observations of a team, ``(num_envs, agents, …)`` each part."""


class Sight(ABC):
    """How one team's observations are kept and turned into tokens.

    Attributes:
        spec: of the tokens.
        parts: of an observation, by name: its shape and dtype.
    """

    spec: TokenSpec
    parts: dict[str, tuple[tuple[int, ...], Any]]

    def blank(self, num_envs: int, agents: int) -> Arrays:
        """Zeros for all agents; who is not there keeps them."""
        return {
            name: np.zeros((num_envs, agents, *shape), dtype)
            for name, (shape, dtype) in self.parts.items()
        }

    @abstractmethod
    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        """Put down what one agent observes."""

    @abstractmethod
    def tokens(self, seen: Mapping[str, Tensor]) -> Tokens:
        """The tokens of all agents, ``(num_envs, agents, N, …)``."""


class FlatSight(Sight):
    """Flat observations and a tokenizer.

    Args:
        tokenizer: of the team.
        name: of the tokenizer, for messages.
        dtype: of the numbers kept.

    Raises:
        InputError: the tokenizer cannot read such observations.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, dtype: Any) -> None:
        self.tokenizer, self.spec = tokenizer, tokenizer.spec
        self.parts = {"numbers": ((tokenizer.observer.size,), dtype)}
        self._try(name)

    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        """Copy the numbers.

        Raises:
            InputError: not as many as the env's space says; numpy would repeat one.
        """
        numbers, expected = np.asarray(observation), self.parts["numbers"][0]
        if numbers.shape != expected:
            raise InputError(
                f"env.module: expected an observation of shape {expected}, as its "
                f"space says, got {numbers.shape}"
            )
        arrays["numbers"][row, agent] = numbers

    def tokens(self, seen: Mapping[str, Tensor]) -> Tokens:
        """Call the tokenizer once for all worlds and agents."""
        numbers = seen["numbers"]
        tokens = self.tokenizer(numbers.flatten(0, 1))
        return tokens.map(lambda part: part.unflatten(0, numbers.shape[:2]))

    def _try(self, name: str) -> None:
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


class TokenSight(Sight):
    """Observations that are tokens already.

    Args:
        space: of one observation.
        dtype: of features that are not uint8.
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

    def write(self, arrays: Arrays, row: int, agent: int, observation: Any) -> None:
        """Copy the three parts."""
        for name, array in arrays.items():
            array[row, agent] = observation[name]

    def tokens(self, seen: Mapping[str, Tensor]) -> Tokens:
        """They are."""
        return Tokens(seen["features"], seen["types"], seen["padding"])


def sight_of(team: Team, tokenizer: Tokenizer | None, name: str, dtype: Any) -> Sight:
    """What fits the team's observation space."""
    if tokenizer is None:
        assert isinstance(team.observation, spaces.Dict)
        return TokenSight(team.observation, dtype)
    return FlatSight(tokenizer, name, dtype)
