"""Inject: additional distractor tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, SampledPerturbation
from marl_pool.perturbations.readings import validate_indices
from marl_pool.perturbations.sampling import normal, uniform_like
from marl_pool.perturbations.selection import append, identity_origin, take_features
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.names import unknown
from marl_pool.utils.types import NonNegativeFloat, NonNegativeInt, PositiveInt


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
      ``spread``: the hardest distractors to ignore.

    Where no token of the type is present, anchors are any tokens but self. Without any
    anchor, or once it vanishes, the distractor is padded. N grows by ``round(severity *
    count)``, with the larger of two severities; unused slots are padded. A pooling head
    for a fixed N cannot be evaluated under it.

    Args:
        token_type: index of the type, or its name if ``type_names`` are given; None:
            the last type that is not signal.
        severity: share of ``count``.
        count: number of distractors at severity 1.
        place: ``"alike"``, ``"far"`` or ``"near"``.
        spread: half side of the square of uniform offsets, in the units of the
            features (in simple-centroid the lengths of the environment divided by 5).
        distance: from the anchors with ``"far"``, in the same units.
        position_features: indices of the features that are a position; None: as in
            ``positions``.
        type_names: names of the types known to the policy.
        signal_types: names of the types that matter for the task; empty: not known.
        has_self: whether tokens of type 0 are the observer's own.
        dtype: of the features. Image patches (uint8) have no position.
        num_features: of a token; None: not known before the first tokens.
        positions: indices of the features that are a position, () if none is; None:
            not known.

    Raises:
        UnfitTokensError: a type that the tokens lack, tokens without noise or without
            a position, or distractors near an observer that has no token.
        InputError: features that are repeated or do not exist.
    """

    word: ClassVar[str] = "injected"
    token_type: NonNegativeInt | str | None = None
    every: PositiveInt | None = field(default=None, init=False)
    count: PositiveInt = 32
    place: Literal["alike", "far", "near"] = "alike"
    spread: NonNegativeFloat = 0.1
    distance: NonNegativeFloat = 2.0
    position_features: list[NonNegativeInt] | None = None
    type_names: Sequence[str] = ()
    signal_types: Sequence[str] = ()
    has_self: bool = True
    dtype: Literal["float32", "uint8"] = "float32"
    num_features: PositiveInt | None = None
    positions: Sequence[int] | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        # Images have no positions to place a token at.
        if self.dtype != "float32":
            raise UnfitTokensError(
                "perturbation inject: expected features with positions, got images"
            )
        if self.place == "near" and not self.has_self:
            raise UnfitTokensError(
                "perturbation.place: expected alike or far, since these tokens include "
                "none of the observer, got near"
            )
        # Injected tokens look like noise unless a type is given.
        self.type_index = (
            _noise_type(self.type_names, self.signal_types)
            if self.token_type is None
            else _type_index(self.token_type, self.type_names)
        )
        # Allocate slots for the highest severity.
        self.num_slots = round(self.high * self.count)
        self.shifted = _shifted_features(self.position_features, self.positions)
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
        return {
            "anchor": _pick(self._candidates(tokens), choice[..., 0]),
            "offset": self._offset(offset).to(tokens.features.dtype),
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
        # Several times faster than an assignment to a list of features.
        features.index_add_(-1, places, state["offset"].to(features.dtype))
        types = torch.full_like(anchor, self.type_index)
        padding = tokens.padding.gather(-1, anchor) | (state["anchor"] < 0)
        return append(tokens, Tokens(features, types, padding))

    def _offset(self, numbers: Tensor) -> Tensor:
        """Transform ``numbers``, uniform in (0, 1), to offsets from the anchors."""
        if self.place != "far":
            return (2 * numbers - 1) * self.spread
        # Gaussian numbers have no preferred direction.
        return self.distance * torch.nn.functional.normalize(normal(numbers), dim=-1)

    def _candidates(self, tokens: Tokens) -> Tensor:
        """Select the possible anchors, ``(num_envs, agents, N)`` bool."""
        present = ~tokens.padding
        if self.place == "near":
            return present & (tokens.types == SELF_TYPE)
        alike = present & (tokens.types == self.type_index)
        others = present & (tokens.types != SELF_TYPE)
        return torch.where(alike.any(-1, keepdim=True), alike, others)


def _pick(candidates: Tensor, choice: Tensor) -> Tensor:
    """Sample candidates ``(*B, N)`` with replacement by numbers in (0, 1), ``(*B, C)``.

    Returns indices ``(*B, C)`` int64, -1 where the row has no candidate.
    """
    # Sort candidates to the front, and index among them.
    first = (~candidates).byte().argsort(dim=-1, stable=True)
    number = candidates.sum(-1, keepdim=True)
    picked = first.gather(-1, (choice * number).long())
    return picked.masked_fill(number == 0, -1)


def _shifted_features(
    chosen: Sequence[int] | None, known: Sequence[int] | None
) -> list[int]:
    """Return the features that an offset moves, by default those in the spec."""
    # Features given by the user.
    if chosen is not None:
        if not chosen or len(set(chosen)) < len(chosen):
            raise InputError(
                "perturbation.position_features: expected null or different numbers of "
                f"features, got {list(chosen)}"
            )
        return list(chosen)
    # Features named by the spec.
    if not known:
        missing = "have no position"
        if known is None:
            missing = "do not say which of their features are a position"
        raise UnfitTokensError(
            "perturbation.position_features: expected numbers of features, since these "
            f"tokens {missing}, got null"
        )
    return list(known)


def _noise_type(type_names: Sequence[str], signal_types: Sequence[str]) -> int:
    """Return the last type that is not signal; acting types come before it."""
    if not signal_types:
        raise UnfitTokensError(
            "perturbation.token_type: expected a type, since these tokens do not say "
            "which of their types are noise, got null"
        )
    noise = [i for i, name in enumerate(type_names) if name not in signal_types]
    if not noise:
        raise UnfitTokensError(
            "perturbation.token_type: expected a type, since these tokens have no type "
            f"of noise, got null: choose from {', '.join(type_names)}"
        )
    return noise[-1]


def _type_index(token_type: int | str, type_names: Sequence[str]) -> int:
    option = "perturbation.token_type"
    # A number needs no names.
    if isinstance(token_type, int):
        if type_names and token_type >= len(type_names):
            most = len(type_names) - 1
            raise UnfitTokensError(f"{option}: expected 0 to {most}, got {token_type}")
        return token_type
    # A name must be one of the spec's.
    if not type_names:
        raise UnfitTokensError(
            f"{option}: expected a number, or type_names with it, got {token_type!r}"
        )
    if token_type not in type_names:
        raise UnfitTokensError(str(unknown(option, token_type, type_names)))
    return list(type_names).index(token_type)
