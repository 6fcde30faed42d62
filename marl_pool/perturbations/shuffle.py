"""Shuffle: tokens change places."""

import torch
from torch import Tensor

from marl_pool.perturbations.base import (
    DrawnPerturbation,
    PerturbationState,
    uniform_like,
)
from marl_pool.perturbations.selection import lowest, permutation, take_features
from marl_pool.tokens import Tokens
from marl_pool.types import PositiveInt, UnitInterval


class Shuffle(DrawnPerturbation):
    """Permute whole tokens: features, types and padding move together.

    The set stays the same, so a permutation-invariant policy notices nothing.

    Source: the shuffle test of AttentionNeuron (Tang and Ha, 2021, section 4.1),
    whose sensors carry no type.

    Args:
        severity: share of the slots, padded ones included, that take part in the
            permutation.
        every: steps from one permutation to the next; None permutes at reset only.
    """

    def __init__(
        self, *, severity: UnitInterval = 1.0, every: PositiveInt | None = None
    ) -> None:
        super().__init__(severity=severity, every=every)

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw a permutation for each agent; see `DrawnPerturbation.draw`."""
        scores = uniform_like(keys, turn, tokens.types.shape[1:])
        slots = torch.ones_like(tokens.padding)
        return {"origin": permutation(scores, lowest(scores, slots, self.severity))}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Permute; see `DrawnPerturbation.apply`."""
        origin = state["origin"]
        return Tokens(
            take_features(tokens.features, origin),
            tokens.types.gather(-1, origin),
            tokens.padding.gather(-1, origin),
        )
