"""Rewire: features of one token shown by another."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, TokenShare
from marl_pool.perturbations.selection import permutation, take_features
from marl_pool.tokens import Tokens
from marl_pool.utils.types import Severity


@dataclass(kw_only=True, eq=False)
class Rewire(TokenShare):
    """Permute the features of the tokens present; types and padding stay.

    Unlike a shuffle this changes the set, and no policy without memory can undo it.
    When a token vanishes, the token that shows its features is padded too.

    Args:
        severity: share of the tokens present that take part in the permutation.
    """

    word: ClassVar[str] = "rewired"
    severity: Severity = 1.0
    protect_self: bool = False

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        crossed = super().apply_severity(tokens, state)["chosen"]
        return {"origin": permutation(state["scores"], crossed)}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        features, types, padding = tokens
        origin = state["origin"]
        dead = padding | padding.gather(-1, origin)
        return Tokens(take_features(features, origin), types, dead)
