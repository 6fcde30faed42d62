"""Confuse: wrong token types."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, TokenShare
from marl_pool.perturbations.sampling import uniform_like
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import UnfitTokensError
from marl_pool.utils.types import Severity


@dataclass(kw_only=True, eq=False)
class Confuse(TokenShare):
    """Replace the type of a share of the tokens by another one; features stay.

    The new type is uniform among the others except self. A policy without a type
    embedding is not affected.

    Args:
        severity: share of the tokens present, without a protected one, whose type is
            replaced.
        protect_self: leave the observer's own token unchanged; otherwise no token
            may remain marked as self.
        type_names: names of the types known to the policy.

    Raises:
        UnfitTokensError: fewer than two named types besides self.
    """

    word: ClassVar[str] = "confused"
    severity: Severity = 0.5
    type_names: Sequence[str] = ()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.first = int(self.has_self)
        self.count = len(self.type_names) - self.first
        if self.count < 2:
            raise UnfitTokensError(
                "perturbation confuse: expected at least two types beside self, "
                f"got {', '.join(self.type_names[self.first :]) or 'none'}"
            )

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        numbers = uniform_like(keys, turn, (2, *tokens.types.shape[1:]))
        return {"scores": numbers[:, 0], "choice": numbers[:, 1]}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        own = tokens.types - self.first
        # Self, at -1 here, is not among the types to choose from.
        others = torch.where(own < 0, self.count, self.count - 1)
        other = (state["choice"] * others).long()
        other = other + ((own >= 0) & (other >= own)) + self.first
        confused = self.chosen(tokens, state)
        return tokens._replace(types=torch.where(confused, other, tokens.types))
