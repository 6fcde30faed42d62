"""Freeze: stuck sensors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, TokenShare
from marl_pool.tokens import Tokens
from marl_pool.utils.types import Severity


@dataclass(kw_only=True, eq=False)
class Freeze(TokenShare):
    """Hold the features of a share of the token slots; types and padding stay current.

    A slot stands for a sensor. The slots are selected at reset, and again at each
    resampling, with the features of that step. If the token of a frozen slot vanishes,
    the slot is padded as usual; a token that appears there shows the held features.

    Args:
        severity: share of the tokens present, without a protected one, that freeze.
    """

    word: ClassVar[str] = "frozen"
    severity: Severity = 0.5

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
