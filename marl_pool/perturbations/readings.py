"""Perturbations of features and types: noisy, stuck or late features, wrong types."""

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import (
    Episodes,
    NonNegativeFloat,
    PositiveInt,
    Severity,
    Size,
    SizeOrZero,
)
from marl_pool.perturbations.base import (
    PerturbationState,
    ProtectingPerturbation,
    TokenShare,
)
from marl_pool.perturbations.sampling import normal, uniform_like
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import constant, may_read
from marl_pool.utils.errors import InputError, UnfitTokensError

WHITE = 255
"""Largest value of an image, which is scaled to [0, 1]."""


@dataclass(kw_only=True, eq=False)
class DisturbedReadings(ProtectingPerturbation):
    """Features with errors ``severity * size * N(0, 1)``, held until resampled.

    Images (uint8) are scaled to [0, 1], as in the embedding of a policy; the result is
    scaled back, rounded and clipped to [0, 255]. A subclass implements `size` and
    `disturb`.

    Args:
        features: indices of the disturbed features, from 0, or None for all but the
            ``markers``.
        num_features: of a token, or None if not known before the first tokens.
        type_names: names of the types, by which ``markers`` are found.
        markers: types and features that say whether there is a token; see `TokenSpec`.
    """

    features: list[SizeOrZero] | None = None
    num_features: Size | None = None
    type_names: Sequence[str] = ()
    markers: Sequence[tuple[str, int]] = ()

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
        return {"errors": normal(uniform_like(keys, turn, tokens.features.shape[1:]))}

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        deviation = (state["severity"] * self.size).float().view(-1, 1, 1, 1)
        return {"errors": state["errors"] * deviation}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        features, errors = tokens.features, state["errors"]
        # Disturb all features, images in [0, 1].
        if features.dtype.is_floating_point:
            result = self.disturb(features, errors).to(features.dtype)
        else:
            result = self.disturb(features / WHITE, errors).mul_(WHITE)
            result = result.round_().clamp_(0, WHITE).to(features.dtype)
        # Restore features that are not to be disturbed.
        if self.features is not None:
            disturbed = [i in self.features for i in range(features.shape[-1])]
            mask = constant(tuple(disturbed), features.device, torch.bool)
            result = torch.where(mask, result, features)
        elif self.markers:
            width = features.shape[-1]
            marked = constant(self._marked(width), features.device, torch.bool)
            # Types of padding may be any number.
            types = tokens.types.clamp(0, len(self.type_names) - 1)
            result = torch.where(marked.view(-1, width)[types], features, result)
        if self.protects:
            result = torch.where(
                (tokens.types == SELF_TYPE)[..., None], features, result
            )
        return tokens._replace(features=result)

    def _marked(self, width: int) -> tuple[bool, ...]:
        """Return for each type whether each feature is a marker, in one row."""
        pairs = itertools.product(self.type_names, range(width))
        return tuple(pair in self.markers for pair in pairs)


@dataclass(kw_only=True, eq=False)
class Bias(DisturbedReadings):
    """Add a Gaussian offset to each feature of each token: a miscalibrated sensor.

    ``x + severity * scale * ε`` with ``ε ~ N(0, 1)``, independent for each token and
    feature and constant until it is resampled. An offset of the observer's own token,
    whose relative features are 0 in any state, would not be a measurement error.

    Args:
        severity: standard deviation of the offsets in units of ``scale``.
        scale: standard deviation at severity 1, in the units of the features (in
            simple-centroid the lengths of the environment divided by 5).
    """

    label: ClassVar[str] = "biased"
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
    """Add Gaussian noise, new at every step, to each feature: an imprecise sensor."""

    label: ClassVar[str] = "jittered"
    every: Episodes | None = 1


@dataclass(kw_only=True, eq=False)
class Scale(DisturbedReadings):
    """Multiply each feature by a log-normal factor around 1: a badly scaled sensor.

    ``x exp(severity * spread * ε)`` with ``ε ~ N(0, 1)``, independent for each token
    and feature and constant until it is resampled. A feature of 0 stays 0. Images
    (uint8) are rounded and clipped to [0, 255].

    Args:
        severity: standard deviation of log factors in units of ``spread``.
        spread: the standard deviation at severity 1, at most 10, so that no factor
            overflows.
    """

    label: ClassVar[str] = "scaled"
    severity: Severity = 0.5
    spread: Annotated[float, Field(ge=0, le=10)] = 1.0

    @property
    @override
    def size(self) -> float:
        return self.spread

    @override
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        return readings * errors.exp()


@dataclass(kw_only=True, eq=False)
class Freeze(TokenShare):
    """Hold the features of a share of the token slots: stuck sensors.

    Types and padding stay current. A slot stands for a sensor. The slots are selected
    at reset, and again at each resampling, with the features of that step. If the token
    of a frozen slot vanishes, the slot is padded as usual; a token that appears there
    shows the held features.

    Args:
        severity: share of the tokens present, except a protected one, that freeze.
    """

    label: ClassVar[str] = "frozen"
    severity: Severity = 0.5

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        frozen = super().apply_severity(tokens, state)["chosen"]
        return {"frozen": frozen, "readings": tokens.features.clone()}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        frozen = state["frozen"][..., None]
        features = torch.where(frozen, state["readings"], tokens.features)
        return tokens._replace(features=features)


@dataclass(kw_only=True, eq=False)
class Delay(ProtectingPerturbation):
    """Show the features of an earlier step: slow sensors.

    Types and padding stay current. Until enough steps have passed, a token shows its
    first features. The same holds after it was padded: values under the padding are
    never shown.

    Args:
        severity: share of ``steps`` by which the features are late.
        steps: delay at severity 1; halves round to even.
    """

    label: ClassVar[str] = "delayed"
    severity: Severity = 0.5
    every: PositiveInt | None = field(default=None, init=False)
    steps: Size = 8

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        # Memory for the largest delay, whatever each environment's severity.
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
            is_self = (tokens.types == SELF_TYPE)[..., None]
            features = torch.where(is_self, tokens.features, features)
        return tokens._replace(features=features)


@dataclass(kw_only=True, eq=False)
class Confuse(TokenShare):
    """Replace the type of a share of the tokens: mistaken identity.

    Features stay. The new type is uniform among the others except self. A policy
    without a type embedding is not affected.

    Args:
        severity: share of the tokens present, except a protected one, whose type is
            replaced.
        protect_self: leave the observer's own token unchanged; otherwise no token
            may remain marked as self.
        type_names: names of the types known to the policy.

    Raises:
        UnfitTokensError: fewer than two named types besides self.
    """

    label: ClassVar[str] = "confused"
    severity: Severity = 0.5
    type_names: Sequence[str] = ()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.first = int(self.has_self)
        self.count = len(self.type_names) - self.first
        if self.count < 2:
            raise UnfitTokensError(
                "perturbation confuse: expected at least two types beside self, "
                f"got {', '.join(self.type_names[self.first :]) or 'none'}"
            )

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        numbers = uniform_like(keys, turn, (2, *tokens.types.shape[1:]))
        return {"scores": numbers[:, 0], "choice": numbers[:, 1]}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        offset = tokens.types - self.first
        # Self, at -1 here, is not among the types to choose from.
        num_choices = torch.where(offset < 0, self.count, self.count - 1)
        types = (state["choice"] * num_choices).long()
        # Skip the token's present type, which is no confusion.
        types = types + ((offset >= 0) & (types >= offset)) + self.first
        confused = self.chosen(tokens, state)
        return tokens._replace(types=torch.where(confused, types, tokens.types))


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
