"""Delay: outdated features."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, SampledPerturbation
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.types import PositiveInt, Severity


class Delay(SampledPerturbation):
    """Show the features of an earlier step with the current types and padding.

    Until enough steps have passed, a token shows its first features. The same holds
    after it was padded: values under the padding are never shown.

    Args:
        severity: share of ``steps``.
        steps: delay at severity 1; halves round to even.
        protect_self: leave the observer's own token unchanged.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
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
        newest = tokens.features[:, None]
        readings = torch.cat([newest, state["readings"][:, :-1]], 1)
        new = state["absent"] & ~tokens.padding
        if new.any():
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
