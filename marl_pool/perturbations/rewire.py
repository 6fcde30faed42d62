"""Rewire: wires are crossed, so that a token shows what belongs to another."""

from typing import Unpack

from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.selection import permutation, take_features
from marl_pool.perturbations.share import RampOptions, TokenShare
from marl_pool.tokens import Tokens
from marl_pool.types import PositiveInt, Severity


class Rewire(TokenShare):
    """Permute the features of the tokens present; types and padding stay.

    Unlike a shuffle this changes the set, and no policy without memory can undo it. A
    token that vanishes in mid-episode leaves the one wired to it without content: that
    one is padded too.

    Args:
        severity: share of the tokens present whose wires are crossed at random.
        every: steps from one wiring to the next; None wires at reset only.
        protect_self: leave the observer's own token alone.
        ramp: episodes of a world in which the severity grows from 0; None: none.
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

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Make a wiring for each agent; see `DrawnPerturbation.settle`."""
        crossed = super().settle(tokens, state)["chosen"]
        return {"origin": permutation(state["scores"], crossed)}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Cross the wires; see `DrawnPerturbation.apply`."""
        features, types, padding = tokens
        origin = state["origin"]
        dead = padding | padding.gather(-1, origin)
        return Tokens(take_features(features, origin), types, dead)
