"""Rewire: features of one token shown by another."""

from typing import Unpack

from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.selection import permutation, take_features
from marl_pool.perturbations.share import RampOptions, TokenShare
from marl_pool.tokens import Tokens
from marl_pool.utils.types import PositiveInt, Severity


class Rewire(TokenShare):
    """Permute the features of the tokens present; types and padding stay.

    Unlike a shuffle this changes the set, and no policy without memory can undo it.
    When a token vanishes, the token that shows its features is padded too.

    Args:
        severity: share of the tokens present that take part in the permutation.
        every: steps between permutations; None: at reset only.
        protect_self: leave the observer's own token unchanged.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
    """

    def __init__(
        self,
        *,
        severity: Severity = 1.0,
        every: PositiveInt | None = None,
        protect_self: bool = False,
        **common: Unpack[RampOptions],
    ) -> None:
        super().__init__(
            severity=severity, protect_self=protect_self, every=every, **common
        )

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
