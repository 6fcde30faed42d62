"""Delay: readings come late."""

import torch
from torch import Tensor

from marl_pool.perturbations.base import DrawnPerturbation, PerturbationState
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import PositiveInt, Severity


class Delay(DrawnPerturbation):
    """Show the features of some steps ago; types and padding are those of now.

    In its first steps, a token shows its first reading. So does one that comes back
    after it was padded: what lay under the padding is never shown.

    Args:
        severity: share of ``steps``.
        steps: how late readings are at severity 1; halves round to even.
        protect_self: leave the observer's own token alone.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity = 0.5,
        steps: PositiveInt = 8,
        protect_self: bool = True,
        ramp: PositiveInt | None = None,
        has_self: bool = True,
    ) -> None:
        super().__init__(severity=severity, ramp=ramp)
        self.steps, self.protects = steps, protect_self and has_self

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Nothing is random but the severity; see `DrawnPerturbation.draw`."""
        return {}

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Begin with the first reading; see `DrawnPerturbation.settle`."""
        longest = round(self.high * self.steps)
        first = tokens.features[:, None].expand(-1, 1 + longest, -1, -1, -1)
        late = (state["severity"] * self.steps).round().long()
        return {"late": late, "readings": first, "absent": tokens.padding.clone()}

    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        """Remember the newest readings, then show old ones; see `Perturbation`."""
        if self.high == 0:
            return tokens, state
        newest = tokens.features[:, None]
        readings = torch.cat([newest, state["readings"][:, :-1]], 1)
        new = state["absent"] & ~tokens.padding
        if new.any():
            readings = torch.where(new[:, None, ..., None], newest, readings)
        remembered = {"readings": readings, "absent": tokens.padding.clone()}
        return super().__call__(tokens, {**state, **remembered})

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Show old readings; see `DrawnPerturbation.apply`."""
        late, readings = state["late"], state["readings"]
        worlds = torch.arange(len(late), device=late.device)
        features = readings[worlds, late]
        if self.protects:
            own = (tokens.types == SELF_TYPE)[..., None]
            features = torch.where(own, tokens.features, features)
        return tokens._replace(features=features)
