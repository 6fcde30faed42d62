"""Sensor errors: a Gaussian number for each token and feature."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, ProtectingPerturbation
from marl_pool.perturbations.sampling import normal_like
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Severity,
)

WHITE = 255
"""Largest value of an image, which is scaled to [0, 1]."""


@dataclass(kw_only=True, eq=False)
class DisturbedReadings(ProtectingPerturbation):
    """Features with errors ``severity * size * N(0, 1)``, held until resampled.

    Images (uint8) are scaled to [0, 1], as in the embedding of a policy; the result is
    scaled back, rounded and clipped to [0, 255]. A subclass implements `size` and
    `disturb`.

    Args:
        features: indices of the disturbed features, from 0; None: all.
        num_features: of a token; None: not known before the first tokens.
    """

    features: list[NonNegativeInt] | None = None
    num_features: PositiveInt | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features is not None and not self.features:
            raise InputError(
                "perturbation.features: expected null or numbers of features, got []"
            )
        validate_indices("features", self.features, self.num_features)

    @property
    @abstractmethod
    def size(self) -> float:
        """Standard deviation of the errors at severity 1."""

    @abstractmethod
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        """Apply errors to readings, both ``(num_envs, agents, N, F)`` floats."""

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        validate_indices("features", self.features, tokens.features.shape[-1])
        return {"errors": normal_like(keys, turn, tokens.features.shape[1:])}

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        deviation = (state["severity"] * self.size).float().view(-1, 1, 1, 1)
        return {"errors": state["errors"] * deviation}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        # The errors were sampled earlier and apply until they are resampled.
        features, errors = tokens.features, state["errors"]
        # Disturb all features, images in [0, 1].
        if features.dtype.is_floating_point:
            seen = self.disturb(features, errors).to(features.dtype)
        else:
            seen = self.disturb(features / WHITE, errors).mul_(WHITE)
            seen = seen.round_().clamp_(0, WHITE).to(features.dtype)
        # Restore what is not to be disturbed.
        if self.features is not None:
            disturbed = [i in self.features for i in range(features.shape[-1])]
            mask = constant(tuple(disturbed), features.device, torch.bool)
            seen = torch.where(mask, seen, features)
        if self.protects:
            seen = torch.where((tokens.types == SELF_TYPE)[..., None], features, seen)
        return tokens._replace(features=seen)


@dataclass(kw_only=True, eq=False)
class Bias(DisturbedReadings):
    """Add a Gaussian offset to each feature of each token, as a miscalibrated sensor.

    ``x + severity * scale * ε`` with ``ε ~ N(0, 1)``, independent for each token and
    feature and constant until it is resampled. An offset of the observer's own token,
    whose relative features are 0 in any state, would be no measurement error.

    Args:
        severity: standard deviation of the offsets in units of ``scale``.
        scale: standard deviation at severity 1, in the units of the features (in
            simple-centroid the lengths of the environment divided by 5).
    """

    word: ClassVar[str] = "biased"
    severity: Severity = 0.1
    scale: NonNegativeFloat = 1.0

    @property
    @override
    def size(self) -> float:
        return self.scale

    @override
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        return readings + errors


@dataclass(kw_only=True, eq=False)
class Jitter(Bias):
    """Add Gaussian noise to features: a `Bias` that is resampled at every step."""

    word: ClassVar[str] = "jittered"
    every: PositiveInt | None = 1


@dataclass(kw_only=True, eq=False)
class Scale(DisturbedReadings):
    """Multiply each feature of each token by a log-normal factor around 1.

    ``x exp(severity * spread * ε)`` with ``ε ~ N(0, 1)``, independent for each token
    and feature and constant until it is resampled: a miscalibrated sensor. A feature
    of 0 stays 0. Images (uint8) are rounded and clipped to [0, 255].

    Args:
        severity: standard deviation of log factors in units of ``spread``.
        spread: the standard deviation at severity 1.
    """

    word: ClassVar[str] = "scaled"
    severity: Severity = 0.5
    spread: NonNegativeFloat = 1.0

    @property
    @override
    def size(self) -> float:
        return self.spread

    @override
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        return readings * errors.exp()


def validate_indices(
    name: str, indices: Sequence[int] | None, num_features: int | None
) -> None:
    """Raise InputError if the option ``name`` lists a feature that does not exist.

    None means all features, or a number of features that is not known yet.
    """
    if indices and num_features is not None and max(indices) >= num_features:
        raise InputError(
            f"perturbation.{name}: expected numbers below {num_features}, "
            f"got {list(indices)}"
        )
