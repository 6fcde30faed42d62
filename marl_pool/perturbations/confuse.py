"""Confuse: some tokens are taken for something else."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from marl_pool.errors import UnfitTokensError
from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.draws import uniform_like
from marl_pool.perturbations.share import ShareOptions, TokenShare
from marl_pool.tokens import Tokens
from marl_pool.types import Severity


class Confuse(TokenShare):
    """Show another type, uniformly among the others but self; features stay.

    A policy without a type embedding notices nothing.

    Args:
        severity: share of the tokens present, without a protected one, whose type is
            taken for another.
        protect_self: leave the observer's own token alone; without it, no token may
            say *self*.
        every: steps from one draw to the next; None draws at reset only.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        type_names: of the types that the policy knows.

    Raises:
        UnfitTokensError: types without names, or fewer than two that can be confused.
    """

    def __init__(
        self,
        *,
        severity: Severity = 0.5,
        protect_self: bool = True,
        type_names: Sequence[str] = (),
        **common: Unpack[ShareOptions],
    ) -> None:
        super().__init__(severity=severity, protect_self=protect_self, **common)
        self.first = int(self.has_self)
        self.count = len(type_names) - self.first
        if self.count < 2:
            raise UnfitTokensError(
                "perturbation confuse: expected at least two types beside self, "
                f"got {', '.join(type_names[self.first :]) or 'none'}"
            )

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw the queue, and a number that chooses; see `DrawnPerturbation.draw`."""
        numbers = uniform_like(keys, turn, (2, *tokens.types.shape[1:]))
        return {"scores": numbers[:, 0], "choice": numbers[:, 1]}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Change the types; see `DrawnPerturbation.apply`."""
        own = tokens.types - self.first
        # The observer's own type, at -1, is none of those chosen from.
        others = torch.where(own < 0, self.count, self.count - 1)
        other = (state["choice"] * others).long()
        other = other + ((own >= 0) & (other >= own)) + self.first
        confused = self.chosen(tokens, state)
        return tokens._replace(types=torch.where(confused, other, tokens.types))
