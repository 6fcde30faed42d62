"""Rewire: wires are crossed, so that a token shows what belongs to another."""

from torch import Tensor

from marl_pool.perturbations.base import (
    DrawnPerturbation,
    PerturbationState,
    uniform_like,
)
from marl_pool.perturbations.selection import lowest, permutation, take_features
from marl_pool.tokens import Tokens
from marl_pool.types import PositiveInt, UnitInterval


class Rewire(DrawnPerturbation):
    """Permute the features of the tokens present; types and padding stay.

    The self token takes part. Unlike a shuffle this changes the set, and no policy
    without memory can undo it. A token that vanishes in mid-episode leaves the one
    wired to it without content: that one is padded too.

    Args:
        severity: share of the tokens present whose wires are crossed at random.
        every: steps from one wiring to the next; None wires at reset only.
    """

    def __init__(
        self, *, severity: UnitInterval = 1.0, every: PositiveInt | None = None
    ) -> None:
        super().__init__(severity=severity, every=every)

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw a wiring for each agent; see `DrawnPerturbation.draw`."""
        scores = uniform_like(keys, turn, tokens.types.shape[1:])
        crossed = lowest(scores, ~tokens.padding, self.severity)
        return {"origin": permutation(scores, crossed)}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Cross the wires; see `DrawnPerturbation.apply`."""
        features, types, padding = tokens
        origin = state["origin"]
        dead = padding | padding.gather(-1, origin)
        return Tokens(take_features(features, origin), types, dead)
