"""What disturbs readings: a Gaussian number for each token and feature."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.perturbations.base import DrawnPerturbation, PerturbationState
from marl_pool.perturbations.draws import normal_like
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import NonNegativeInt, PositiveInt, Severity

WHITE = 255
"""The largest value of an image's features, which count from 0 to 1 here."""


class ReadingOptions(TypedDict, total=False):
    """The options of `DisturbedReadings` that subclasses pass on to it."""

    features: list[NonNegativeInt] | None
    protect_self: bool
    every: PositiveInt | None
    ramp: PositiveInt | None
    has_self: bool
    num_features: PositiveInt | None


class DisturbedReadings(DrawnPerturbation):
    """Readings with errors, of N(0, 1) times ``severity * size`` until the next draw.

    Images (uint8) count from 0 to 1 here, as they do for a policy's embedding; what
    comes out is rounded and kept in [0, 255]. A family writes `disturb`.

    Args:
        severity: standard deviation in units of ``size``.
        size: the standard deviation at severity 1.
        features: numbers of the features that are disturbed; None: all.
        protect_self: leave the observer's own token alone.
        every: steps from one draw to the next; None draws at reset only.
        ramp: episodes in which the severity grows.
        has_self: whether tokens of type 0 are the observer's own.
        num_features: of a token; None: not known before there are tokens.

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
        """Readings with errors, both ``(num_envs, agents, N, F)`` floats."""

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw the errors; see `DrawnPerturbation.draw`."""
        self._check(tokens.features.shape[-1])
        return {"errors": normal_like(keys, turn, tokens.features.shape[1:])}

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Scale the errors; see `DrawnPerturbation.settle`."""
        deviation = (state["severity"] * self.size).float().view(-1, 1, 1, 1)
        return {"errors": state["errors"] * deviation}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Disturb the readings; see `DrawnPerturbation.apply`."""
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
    """Raise InputError if the option ``name`` lists features that there are not."""
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
