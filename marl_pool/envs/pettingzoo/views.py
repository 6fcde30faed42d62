"""Views of the observations of PettingZoo teams as tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.pettingzoo.teams import PettingZooTeam
from marl_pool.envs.tokenizers import fitting, make_tokenizer
from marl_pool.envs.tokenizers.base import Observer, Tokenizer
from marl_pool.observations.make import make_view
from marl_pool.observations.parts import Part, PlainSpace
from marl_pool.observations.slots import Slots
from marl_pool.observations.view import TokenOptions, TokenView
from marl_pool.options.types import NonNegativeInt, Size, SizeOrZero
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, first_line

Padding = Literal["zero_rows"]
Channels = Literal["first", "last"]
Drop = Literal["last", "farthest"]
Presence = NonNegativeInt | dict[str, NonNegativeInt]
"""For all matrices, or by the name of each."""
MaxTokens = Size | dict[str, Size]
"""For all tokens, or for each list."""
Names = list[str]
Indices = list[SizeOrZero]
MAPPINGS = ("presence_keys", "padding_keys", "slices")
"""Options whose values are mappings even without groups."""
NUMBERS = "numbers"
"""Name of the part that holds a vector."""


@dataclass(frozen=True)
class ViewMaker:
    """Maker of the view of each team, from the options of `PettingZooEnv`."""

    teams: Mapping[str, PettingZooTeam]
    all_agents: tuple[str, ...]
    """Names of all agents, in the environment's order."""
    module: str
    options: Mapping[str, Any]
    """Keyword arguments with which the environment was built."""
    tokenizer: str | None
    by_option: Mapping[str, Any]
    """Fields of `TokenOptions`, each a value for all teams or values by team."""
    device: torch.device
    number: Any
    """NumPy dtype of floats."""

    def make(self) -> dict[str, TokenView]:
        """Return the views by team.

        Raises:
            InputError: options that do not fit the observations or the teams.
        """
        for key, value in self.by_option.items():
            if self._is_by_group(key) and (unknown := value.keys() - self.teams):
                raise InputError(
                    f"env.{key}: expected values by the groups "
                    f"{', '.join(self.teams)}, got {', '.join(sorted(unknown))}"
                )
        return {name: self._make_view(name) for name in self.teams}

    def _make_view(self, group: str) -> TokenView:
        vectors: list[TokenView] = []

        def view_of_vector(space: spaces.Box | spaces.MultiBinary) -> TokenView:
            vectors.append(self._tokenized(group, space))
            return vectors[0]

        team = self.teams[group]
        by_option = {key: self._of_group(key, group) for key in self.by_option}
        options = {key: value for key, value in by_option.items() if value is not None}
        try:
            view = make_view(
                team.observation,
                _token_options(options),
                number=self.number,
                vector=view_of_vector,
                where=f"env.module: agent {team.agents[0]!r}",
                prefix="env.",
            )
        except InputError as error:
            where = f" (group {group!r})" if len(self.teams) > 1 else ""
            raise InputError(f"{error}{where}") from error
        if self.tokenizer is not None and not vectors:
            raise InputError(
                f"env.tokenizer: expected null, because group {group!r} observes no "
                f"vector, got {self.tokenizer!r}"
            )
        return view

    def _of_group(self, key: str, group: str) -> Any:
        value = self.by_option[key]
        return value.get(group) if self._is_by_group(key) else value

    def _is_by_group(self, key: str) -> bool:
        """Return True if an option has values by group."""
        value = self.by_option[key]
        # Of a single group, numbers of tokens may be by entry.
        if key == "max_tokens" and len(self.teams) == 1 and isinstance(value, dict):
            return not value.keys().isdisjoint(self.teams)
        if key not in MAPPINGS or value is None:
            return isinstance(value, dict)
        # A slice is a mapping too, which has a start.
        return all(
            isinstance(part, dict) and "start" not in part for part in value.values()
        )

    def _tokenized(
        self, group: str, space: spaces.Box | spaces.MultiBinary
    ) -> TokenView:
        """Return the view of vectors by the tokenizer of the options or the module."""
        name = self.tokenizer or fitting(self.module)
        observer = Observer(
            group,
            tuple(map(str, self.teams[group].agents)),
            self.all_agents,
            (space.shape or ())[0],
            self.options,
            self.device,
        )
        tokenizer = make_tokenizer(name, observer)
        return TokenizedView(space, tokenizer, name, self.number)


class TokenizedView(TokenView):
    """Vectors, converted by a tokenizer in one call for the whole batch.

    Args:
        space: space of the vectors.
        tokenizer: tokenizer that converts them.
        name: name of the tokenizer, for errors.
        number: NumPy dtype in which floats are stored.

    Raises:
        InputError: the tokenizer does not fit the observations.
    """

    def __init__(
        self, space: PlainSpace, tokenizer: Tokenizer, name: str, number: Any
    ) -> None:
        super().__init__(tokenizer.spec, {NUMBERS: Part.of(space, "", number)})
        self.tokenizer = tokenizer
        self.dtype = torch.from_numpy(np.zeros(0, number)).dtype
        self._validate(name)

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        return {NUMBERS: observation}

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        numbers = parts[NUMBERS].to(self.dtype)
        tokens = self.tokenizer(numbers.flatten(0, -2))
        return tokens.map(lambda part: part.unflatten(0, numbers.shape[:-1]))

    @property
    @override
    def slots(self) -> Slots:
        return self.tokenizer.slots

    @override
    def invert(self, tokens: Tokens) -> dict[str, Tensor]:
        return {NUMBERS: self.tokenizer.invert(tokens)}

    @override
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        return values[NUMBERS]

    def _validate(self, name: str) -> None:
        # Try the tokenizer on zeros, so that a misfit is found before training.
        observer, spec = self.tokenizer.observer, self.spec
        where = f"env.tokenizer: {name} does not fit observations of {observer.size} "
        where += "numbers"
        try:
            zeros = torch.zeros(2, observer.size, device=observer.device)
            tokens = self.tokenizer(zeros)
        except (RuntimeError, LookupError, ValueError) as error:
            raise InputError(f"{where}: {first_line(error)}") from error
        shape = (2, spec.num_tokens)
        for part, tensor, expected, dtype in (
            ("features", tokens.features, (*shape, spec.num_features), None),
            ("types", tokens.types, shape, torch.int64),
            ("padding", tokens.padding, shape, torch.bool),
        ):
            if tensor.shape != expected or dtype not in (None, tensor.dtype):
                raise InputError(
                    f"{where}: expected {part} of shape {expected}"
                    f"{f' and {dtype}' if dtype else ''}, got {tuple(tensor.shape)} "
                    f"and {tensor.dtype}"
                )
        highest = int(tokens.types.max())
        if not 0 <= int(tokens.types.min()) <= highest < spec.num_types:
            raise InputError(
                f"{where}: expected types below {spec.num_types}, got {highest}"
            )


def _token_options(options: Mapping[str, Any]) -> TokenOptions:
    try:
        return TokenOptions(**options)
    except InputError as error:
        raise InputError(f"env.{error}") from error
