"""Duplicate: repeated tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, TokenShare
from marl_pool.perturbations.selection import (
    append,
    counted,
    identity_origin,
    take_features,
)
from marl_pool.tokens import Tokens
from marl_pool.utils.types import Severity


@dataclass(kw_only=True, eq=False)
class Duplicate(TokenShare):
    """Append a second copy of a share of the tokens.

    A maximum is not affected, a mean is. A copy shows the current features of its
    token, and is padded when the token vanishes. N grows by ``round(severity * N)``,
    with the larger of two severities; unused slots are padded. A pooling head for a
    fixed N cannot be evaluated under it.

    Args:
        severity: share of the tokens present, without a protected one, that are
            duplicated.
    """

    word: ClassVar[str] = "duplicated"
    severity: Severity = 0.5

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        slots = torch.arange(
            round(self.high * tokens.num_tokens), device=tokens.types.device
        )
        # The eligible tokens in random order, of which the first are copied.
        eligible = self.eligible(tokens)
        queue = state["scores"].masked_fill(~eligible, torch.inf).argsort(-1)
        unused = slots >= counted(eligible, state["severity"].view(-1, 1, 1))
        copied = queue[..., : len(slots)].masked_fill(unused, -1)
        return {"origin": torch.cat([identity_origin(tokens), copied], -1)}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        copied = state["origin"][..., tokens.num_tokens :]
        source = copied.clamp(min=0)
        features = take_features(tokens.features, source)
        types, padding = tokens.types.gather(-1, source), tokens.padding
        padding = padding.gather(-1, source) | (copied < 0)
        return append(tokens, Tokens(features, types, padding))
