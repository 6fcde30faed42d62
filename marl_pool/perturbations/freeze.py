"""Freeze: some sensors repeat what they read last."""

from typing import Unpack

import torch

from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.share import ShareOptions, TokenShare
from marl_pool.tokens import Tokens
from marl_pool.types import Severity


class Freeze(TokenShare):
    """Sensors repeat the reading that they had when they froze; types stay live.

    A token's slot stands for a sensor. Those that freeze do so at reset, or others at
    each draw, with the reading of that moment. A frozen sensor whose token vanishes is
    padded as it would be; if one comes back to it, it shows the old reading.

    Args:
        severity: share of the tokens present, without a protected one, that freeze.
        protect_self: leave the observer's own token alone.
        every: steps after which others freeze; None: those of the reset stay frozen.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
    """

    def __init__(
        self,
        *,
        severity: Severity = 0.5,
        protect_self: bool = True,
        **common: Unpack[ShareOptions],
    ) -> None:
        super().__init__(severity=severity, protect_self=protect_self, **common)

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Keep the readings; see `DrawnPerturbation.settle`."""
        chosen = super().settle(tokens, state)["chosen"]
        return {"frozen": chosen, "readings": tokens.features.clone()}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Repeat the readings; see `DrawnPerturbation.apply`."""
        frozen = state["frozen"][..., None]
        features = torch.where(frozen, state["readings"], tokens.features)
        return tokens._replace(features=features)
