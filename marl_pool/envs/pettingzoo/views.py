"""Views of the observations of PettingZoo teams as tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from gymnasium import spaces

from marl_pool.envs.pettingzoo.teams import PettingZooTeam
from marl_pool.envs.tokenizers import fitting, make_tokenizer
from marl_pool.envs.tokenizers.base import Observer
from marl_pool.envs.tokenizers.view import TokenizedView
from marl_pool.observations.make import make_view
from marl_pool.observations.view import TokenOptions, TokenView
from marl_pool.options.types import SizeOrZero
from marl_pool.utils.errors import InputError

Padding = Literal["zero_rows"]
Channels = Literal["first", "last"]
Names = list[str]
Indices = list[SizeOrZero]


@dataclass(frozen=True)
class ViewMaker:
    """Makes the view of each team, from the options of `PettingZooEnv`."""

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
            if isinstance(value, dict) and (unknown := value.keys() - self.teams):
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
                TokenOptions(**options),
                number=self.number,
                vector=view_of_vector,
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
        return value.get(group) if isinstance(value, dict) else value

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
