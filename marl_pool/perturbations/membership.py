"""Perturbations of the set: tokens removed, repeated or added."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.options.names import unknown
from marl_pool.options.types import (
    Extent,
    NonNegativeFloat,
    PositiveInt,
    Severity,
    Size,
    SizeOrZero,
)
from marl_pool.perturbations.base import (
    PerturbationState,
    SampledPerturbation,
    TokenShare,
)
from marl_pool.perturbations.perception import Perception
from marl_pool.perturbations.readings import validate_indices
from marl_pool.perturbations.sampling import normal, uniform_like
from marl_pool.tokens import SELF_TYPE, Tokens, append, identity_origin, take_features
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError, UnfitTokensError


@dataclass(kw_only=True, eq=False)
class Occlude(TokenShare):
    """Remove a share of the tokens, or set their features to 0: dead sensors.

    Exactly ``round(severity * n)`` of n tokens are removed in each row; n counts the
    tokens present of the kinds in ``among``, except a protected one. The same tokens
    are missing until the next resampling; when a token vanishes from the environment in
    between, the number is recomputed.

    Args:
        severity: share of the tokens that is removed; halves round to even.
        mode: ``"drop"`` pads them, so that the policy knows that they are missing.
            ``"zero"`` sets their features to 0, as a dead sensor does. Where features
            are relative to the observer, 0 is the position of the observer.
        among: kinds of tokens: ``"any"``, ``"signal"`` (types that matter for the
            task), ``"noise"`` (the other types), or names of types.
        type_names: names of the types known to the policy.
        signal_types: names of the types that matter for the task.

    Raises:
        UnfitTokensError: a type that the tokens lack, or no signal types.
    """

    label: ClassVar[str] = "occluded"
    severity: Severity = 0.5
    mode: Literal["drop", "zero"] = "drop"
    among: Literal["any", "signal", "noise"] | list[str] = "any"
    type_names: Sequence[str] = ()
    signal_types: Sequence[str] = ()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds = self._kinds()

    @override
    def eligible(self, tokens: Tokens) -> Tensor:
        eligible = super().eligible(tokens)
        if self.kinds is None:
            return eligible
        kinds = constant(tuple(self.kinds), tokens.types.device)
        return eligible & torch.isin(tokens.types, kinds)

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        missing, features = self.chosen(tokens, state), tokens.features
        if self.mode == "drop":
            return tokens._replace(padding=tokens.padding | missing)
        zeroed = torch.where(missing[..., None], 0, features).to(features.dtype)
        return tokens._replace(features=zeroed)

    @override
    def perceive(
        self, true: Tokens, perturbed: Tokens, state: PerturbationState
    ) -> Perception:
        # A dead sensor's zeros say nothing about its token either.
        perceived = super().perceive(true, perturbed, state)
        missing = self.chosen(true, state)
        affected = self.affected(state["steps"] - 1, true.types.shape[1])
        if affected is not None:
            missing = missing & affected[..., None]  # not in place: it is in the state
        return replace(perceived, removed=perceived.removed | missing)

    def _kinds(self) -> list[int] | None:
        """Return the numbers of the types in ``among``, None for all."""
        names, among = self.type_names, self.among
        if among == "any":
            return None
        if isinstance(among, str):
            if not self.signal_types:
                raise UnfitTokensError(
                    "perturbation.among: expected any or names of types, since these "
                    f"tokens do not distinguish signal from noise, got {among}"
                )
            is_signal = among == "signal"
            types = [name for name in names if (name in self.signal_types) == is_signal]
            # If only the observer's own type is left, there is nothing to occlude.
            if set(types) <= {*names[: int(self.has_self)]}:
                raise UnfitTokensError(
                    f"perturbation.among: no type of tokens here is {among}"
                )
            among = types
        if not among:
            raise InputError("perturbation.among: expected at least one type, got none")
        if self.protects and not set(among) - {*names[: SELF_TYPE + 1]}:
            raise UnfitTokensError(
                f"perturbation.among: expected a type other than {names[SELF_TYPE]}, "
                "which protect_self spares"
            )
        return [_type_number("perturbation.among", name, names) for name in among]


@dataclass(kw_only=True, eq=False)
class Duplicate(TokenShare):
    """Append a second copy of a share of the tokens: double counts.

    A maximum is not affected, a mean is. A copy shows the current features of its
    token, and is padded when the token vanishes. N grows by ``round(severity * N)``,
    for the larger of two severities; unused slots are padded. A pooling head for a
    fixed N cannot be evaluated with it.

    Args:
        severity: share of the tokens present, except a protected one, that are
            duplicated.
    """

    label: ClassVar[str] = "duplicated"
    severity: Severity = 0.5

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        slots = torch.arange(
            round(self.high * tokens.num_tokens), device=tokens.types.device
        )
        # Copy the first of the eligible tokens in random order.
        eligible = self.eligible(tokens)
        queue = state["scores"].masked_fill(~eligible, torch.inf).argsort(-1)
        unused = slots >= self.num_chosen(eligible, state)
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


@dataclass(kw_only=True, eq=False)
class Inject(SampledPerturbation):
    """Append distractor tokens that move consistently with the environment.

    A perturbation has no access to the environment, so a distractor takes its motion
    from an *anchor*, a token that is sampled at reset: at every step it copies the
    features of its anchor and stands at a fixed offset from it. An offset between two
    entities does not depend on the observer, so relative positions stay consistent.

    - ``"alike"``: anchors are tokens of the distractor's type, with an offset within
      ``spread``, so that distractors are distributed like the tokens of their type.
    - ``"far"``: the same anchors, at ``distance`` in a random direction.
    - ``"near"``: the anchor is the observer's own token, with an offset within
      ``spread`` from where the observer is: the hardest distractors to ignore.

    If no token of the type is present, anchors are any tokens except self. Without any
    anchor, or once it vanishes, the distractor is padded. N grows by ``round(severity *
    count)``, for the larger of two severities; unused slots are padded. A pooling head
    for a fixed N cannot be evaluated with it.

    Args:
        token_type: index of the type, or its name if ``type_names`` are given, or None
            for the last type that is not signal.
        severity: share of ``count`` that is appended.
        count: number of distractors at severity 1.
        place: ``"alike"``, ``"far"`` or ``"near"``.
        spread: half side of the square of uniform offsets, in the units of the
            features (in simple-centroid the lengths of the environment divided by 5).
        distance: from the anchors with ``"far"``, in the same units.
        relative: whether positions are relative to the observer, so that it is at 0,
            whatever its own token says; if not, it is where its own token says. It
            matters for ``"near"`` alone.
        position_features: indices of the features that are a position, or None for
            ``positions``.
        type_names: names of the types known to the policy.
        signal_types: names of the types that matter for the task; empty: not known.
        has_self: whether tokens of type 0 are the observer's own.
        dtype: of the features. Image patches (uint8) have no position.
        num_features: of a token, or None if not known before the first tokens.
        positions: indices of the features that are a position, () if none is, or None
            if not known.

    Raises:
        UnfitTokensError: a type that the tokens lack, tokens without noise or without
            a position, or distractors near an observer that has no token.
        InputError: features that are repeated or do not exist.
    """

    label: ClassVar[str] = "injected"
    token_type: SizeOrZero | str | None = None
    every: PositiveInt | None = field(default=None, init=False)
    count: Size = 32
    place: Literal["alike", "far", "near"] = "alike"
    spread: NonNegativeFloat = 0.1
    distance: NonNegativeFloat = 2.0
    relative: bool = True
    position_features: list[SizeOrZero] | None = None
    type_names: Sequence[str] = ()
    signal_types: Sequence[str] = ()
    has_self: bool = True
    dtype: Literal["float32", "uint8"] = "float32"
    num_features: Size | None = None
    positions: Sequence[Extent] | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != "float32":
            raise UnfitTokensError(
                "perturbation inject: expected features with positions, got images"
            )
        if self.place == "near" and not self.has_self:
            raise UnfitTokensError(
                "perturbation.place: expected alike or far, since these tokens do not "
                "include the observer's, got near"
            )
        self.type_index = self._type_index()
        self.num_slots = round(self.high * self.count)
        self.shifted = self._shifted_features()
        validate_indices("position_features", self.shifted, self.num_features)

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        if not tokens.features.dtype.is_floating_point:
            raise InputError("perturbation inject: expected features with positions")
        width, num_features = len(self.shifted), tokens.features.shape[-1]
        validate_indices("position_features", self.shifted, num_features)
        shape = (tokens.types.shape[1], self.count, 1 + width)
        numbers = uniform_like(keys, turn, shape)[:, :, : self.num_slots]
        # One number chooses the anchor, the others the offset.
        choice, offset = numbers.split([1, width], -1)
        if self.place == "far":
            # Gaussian numbers have no preferred direction.
            direction = torch.nn.functional.normalize(normal(offset), dim=-1)
            offset = self.distance * direction
        else:
            offset = (2 * offset - 1) * self.spread
        return {
            "anchor": self._anchors(tokens, choice[..., 0]),
            "offset": offset.to(tokens.features.dtype),
        }

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        anchor = state["anchor"]
        # Keep the first slots only, as many as the severity allows.
        slots = torch.arange(self.num_slots, device=anchor.device)
        beyond = slots >= (state["severity"] * self.count).round().view(-1, 1, 1)
        origin = torch.cat([identity_origin(tokens), torch.full_like(anchor, -1)], -1)
        return {"anchor": anchor.masked_fill(beyond, -1), "origin": origin}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        # Copy the anchors' features and move them; slots without one are padded below.
        anchor = state["anchor"].clamp(min=0)
        features = take_features(tokens.features, anchor)
        places = constant(tuple(self.shifted), anchor.device)
        if self.place == "near" and self.relative:
            # The own token may hold an absolute position, as in mpe2 and lbforaging.
            features.index_fill_(-1, places, 0)
        # Several times faster than an assignment to a list of features.
        features.index_add_(-1, places, state["offset"].to(features.dtype))
        types = torch.full_like(anchor, self.type_index)
        padding = tokens.padding.gather(-1, anchor) | (state["anchor"] < 0)
        return append(tokens, Tokens(features, types, padding))

    def _anchors(self, tokens: Tokens, choice: Tensor) -> Tensor:
        """Sample anchors with replacement by numbers in (0, 1), ``(*B, slots)``.

        Returns their indices, int64, -1 where no token can be an anchor.
        """
        # Find the candidates, ``(*B, N)``.
        present = ~tokens.padding
        if self.place == "near":
            candidates = present & (tokens.types == SELF_TYPE)
        else:
            # Beside tokens of the same type or, without any, beside all others.
            alike = present & (tokens.types == self.type_index)
            neighbors = present & ((tokens.types != SELF_TYPE) | (not self.has_self))
            candidates = torch.where(alike.any(-1, keepdim=True), alike, neighbors)
        # Sort them to the front, and index among them.
        first = (~candidates).byte().argsort(dim=-1, stable=True)
        number = candidates.sum(-1, keepdim=True)
        # Below `number`, since `choice` is below 1.
        picked = first.gather(-1, (choice * number).long())
        return picked.masked_fill(number == 0, -1)

    def _type_index(self) -> int:
        """Return the type of distractors, by default the last that is not signal."""
        option, names = "perturbation.token_type", self.type_names
        token_type = self.token_type
        if isinstance(token_type, int):
            if names and token_type >= len(names):
                most = len(names) - 1
                raise UnfitTokensError(
                    f"{option}: expected 0 to {most}, got {token_type}"
                )
            return token_type
        if token_type is not None:
            if not names:
                raise UnfitTokensError(
                    f"{option}: expected a number, or type_names with it, "
                    f"got {token_type!r}"
                )
            return _type_number(option, token_type, names)
        if not self.signal_types:
            raise UnfitTokensError(
                f"{option}: expected a type, since these tokens do not say which of "
                "their types are noise (env.signal_types can), got null"
            )
        # Types that act come before types of noise.
        noise = [i for i, name in enumerate(names) if name not in self.signal_types]
        if not noise:
            raise UnfitTokensError(
                f"{option}: expected a type, since these tokens have no type of noise, "
                f"got null: choose from {', '.join(names)}"
            )
        return noise[-1]

    def _shifted_features(self) -> list[int]:
        """Return the features that an offset moves, by default those in the spec."""
        option, features = "perturbation.position_features", self.position_features
        if features is not None:
            if not features or len(set(features)) < len(features):
                raise InputError(
                    f"{option}: expected null or different numbers of features, "
                    f"got {features}"
                )
            return features
        if not self.positions:
            missing = "have no position"
            if self.positions is None:
                missing = "do not say which of their features are a position"
            raise UnfitTokensError(
                f"{option}: expected numbers of features, since these tokens "
                f"{missing}, got null"
            )
        return list(self.positions)


def _type_number(option: str, name: str, type_names: Sequence[str]) -> int:
    if name not in type_names:
        raise UnfitTokensError(str(unknown(option, name, type_names or ["any"])))
    return type_names.index(name)
