"""Occlude: some tokens are not seen."""

from typing import Literal

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.perturbations.base import (
    DrawnPerturbation,
    PerturbationState,
    uniform_like,
)
from marl_pool.perturbations.selection import lowest
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import PositiveInt, UnitInterval


class Occlude(DrawnPerturbation):
    """Take away exactly ``round(severity * n)`` of n tokens, in each row.

    n counts the tokens present, without the protected one. The same tokens are
    missing until the next draw; when one of those present vanishes from the world in
    between, the count is taken anew.

    Args:
        severity: share of the tokens that is taken away. Halves round to even.
        mode: ``"drop"`` pads them: they are known to be missing. ``"zero"`` sets
            their features to 0 and lets them stand, as a dead sensor does. Where
            features are relative to the observer, 0 says *an entity on top of me*:
            a lie, not an absence.
        protect_self: leave the observer's own token alone.
        every: steps from one draw to the next; None draws at reset only.
        has_self: whether tokens of type 0 are the observer's own.

    Raises:
        InputError: an unknown mode or a number out of range.
    """

    def __init__(
        self,
        *,
        severity: UnitInterval = 0.5,
        mode: Literal["drop", "zero"] = "drop",
        protect_self: bool = True,
        every: PositiveInt | None = None,
        has_self: bool = True,
    ) -> None:
        super().__init__(severity=severity, every=every)
        if mode not in ("drop", "zero"):
            raise InputError(f"perturbation.mode: expected drop or zero, got {mode!r}")
        self.mode, self.protects = mode, protect_self and has_self

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw each slot's place in the queue; see `DrawnPerturbation.draw`."""
        return {"scores": uniform_like(keys, turn, tokens.types.shape[1:])}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Take the tokens away; see `DrawnPerturbation.apply`."""
        features, types, padding = tokens
        eligible = ~padding
        if self.protects:
            eligible = eligible & (types != SELF_TYPE)
        missing = lowest(state["scores"], eligible, self.severity)
        if self.mode == "drop":
            return Tokens(features, types, padding | missing)
        zeroed = torch.where(missing[..., None], 0, features).to(features.dtype)
        return Tokens(zeroed, types, padding)
