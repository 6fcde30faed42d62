"""Delay: outdated features."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, ProtectingPerturbation
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import may_read
from marl_pool.utils.types import PositiveInt, Severity


@dataclass(kw_only=True, eq=False)
class Delay(ProtectingPerturbation):
    """Show the features of an earlier step with the current types and padding.

    Until enough steps have passed, a token shows its first features. The same holds
    after it was padded: values under the padding are never shown.

    Args:
        severity: share of ``steps``.
        steps: delay at severity 1; halves round to even.
    """

    word: ClassVar[str] = "delayed"
    severity: Severity = 0.5
    every: PositiveInt | None = field(default=None, init=False)
    steps: PositiveInt = 8

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        return {}  # only the severity is random

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        longest = round(self.high * self.steps)
        first = tokens.features[:, None].expand(-1, 1 + longest, -1, -1, -1)
        late = (state["severity"] * self.steps).round().long()
        return {"late": late, "readings": first, "absent": tokens.padding.clone()}

    @override
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        if self.high == 0:
            return tokens, state
        # Push the newest features; where a token has appeared, they are all it has.
        newest = tokens.features[:, None]
        readings = torch.cat([newest, state["readings"][:, :-1]], 1)
        new = state["absent"] & ~tokens.padding
        if not may_read(new) or new.any():
            readings = torch.where(new[:, None, ..., None], newest, readings)
        history = {"readings": readings, "absent": tokens.padding.clone()}
        return super().__call__(tokens, {**state, **history})

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        late, readings = state["late"], state["readings"]
        envs = torch.arange(len(late), device=late.device)
        features = readings[envs, late]
        if self.protects:
            own = (tokens.types == SELF_TYPE)[..., None]
            features = torch.where(own, tokens.features, features)
        return tokens._replace(features=features)
