"""Base class of sensor errors: a Gaussian number for each token and feature."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, SampledPerturbation
from marl_pool.perturbations.draws import normal_like
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import NonNegativeInt, PositiveInt, Severity

WHITE = 255
"""Largest value of an image, which is scaled to [0, 1]."""


class ReadingOptions(TypedDict, total=False):
    """Options of `DisturbedReadings` that subclasses pass on to it."""

    features: list[NonNegativeInt] | None
    protect_self: bool
    every: PositiveInt | None
    ramp: PositiveInt | None
    has_self: bool
    num_features: PositiveInt | None


class DisturbedReadings(SampledPerturbation):
    """Features with errors ``severity * size * N(0, 1)``, held until resampled.

    Images (uint8) are scaled to [0, 1], as in the embedding of a policy; the result is
    scaled back, rounded and clipped to [0, 255]. A subclass implements `disturb`.

    Args:
        severity: standard deviation in units of ``size``.
        size: the standard deviation at severity 1.
        features: indices of the disturbed features; None: all.
        protect_self: leave the observer's own token unchanged.
        every: steps between resamplings; None: at reset only.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        num_features: of a token; None: not known before the first tokens.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity,
        size: float,
        features: Sequence[int] | None = None,
        protect_self: bool = True,
        every: PositiveInt | None = None,
        ramp: PositiveInt | None = None,
        has_self: bool = True,
        num_features: int | None = None,
    ) -> None:
        super().__init__(severity=severity, every=every, ramp=ramp)
        if features is not None and not (features and min(features) >= 0):
            raise InputError(
                "perturbation.features: expected null or numbers of features, "
                f"got {list(features)}"
            )
        self.size, self.protects = size, protect_self and has_self
        self.features = None if features is None else list(features)
        if num_features is not None:
            self._check(num_features)

    @abstractmethod
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        """Apply errors to readings, both ``(num_envs, agents, N, F)`` floats."""

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        self._check(tokens.features.shape[-1])
        return {"errors": normal_like(keys, turn, tokens.features.shape[1:])}

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        deviation = (state["severity"] * self.size).float().view(-1, 1, 1, 1)
        return {"errors": state["errors"] * deviation}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        features, errors = tokens.features, state["errors"]
        if features.dtype.is_floating_point:
            seen = self.disturb(features, errors).to(features.dtype)
        else:
            seen = self.disturb(features / WHITE, errors).mul_(WHITE)
            seen = seen.round_().clamp_(0, WHITE).to(features.dtype)
        if self.features is not None:
            untouched = torch.ones(features.shape[-1], device=features.device).bool()
            untouched[self.features] = False
            seen = torch.where(untouched, features, seen)
        if self.protects:
            seen = torch.where((tokens.types == SELF_TYPE)[..., None], features, seen)
        return tokens._replace(features=seen)

    def _check(self, num_features: int) -> None:
        if self.features is not None:
            check_numbers("features", self.features, num_features)


def check_numbers(name: str, numbers: Sequence[int], num_features: int) -> None:
    """Raise InputError if the option ``name`` lists a feature that does not exist."""
    if numbers and max(numbers) >= num_features:
        raise InputError(
            f"perturbation.{name}: expected numbers below {num_features}, "
            f"got {list(numbers)}"
        )


def check_size(name: str, size: float) -> float:
    """Raise InputError if the option ``name`` is negative or not a number."""
    if not size >= 0:
        raise InputError(
            f"perturbation.{name}: expected a number of at least 0, got {size}"
        )
    return size
