"""Freeze: stuck sensors."""

from typing import Unpack

import torch
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.share import ShareOptions, TokenShare
from marl_pool.tokens import Tokens
from marl_pool.utils.types import Severity


class Freeze(TokenShare):
    """Hold the features of a share of the token slots; types and padding stay current.

    A slot stands for a sensor. The slots are selected at reset, and again at each
    resampling, with the features of that step. If the token of a frozen slot vanishes,
    the slot is padded as usual; a token that appears there shows the held features.

    Args:
        severity: share of the tokens present, without a protected one, that freeze.
        protect_self: leave the observer's own token unchanged.
        every: steps between resamplings of the frozen slots; None: at reset only.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
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

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        chosen = super().apply_severity(tokens, state)["chosen"]
        return {"frozen": chosen, "readings": tokens.features.clone()}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        frozen = state["frozen"][..., None]
        features = torch.where(frozen, state["readings"], tokens.features)
        return tokens._replace(features=features)
