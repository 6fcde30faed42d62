"""Inject: there are more things to see than matter."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from marl_pool.errors import InputError, UnfitTokensError
from marl_pool.names import unknown
from marl_pool.perturbations.base import DrawnPerturbation, PerturbationState
from marl_pool.perturbations.draws import normal, uniform_like
from marl_pool.perturbations.readings import check_numbers, check_size
from marl_pool.perturbations.selection import append, own_places, take_features
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import NonNegativeFloat, NonNegativeInt, PositiveInt, Severity

PLACES = ("alike", "far", "near")


class Inject(DrawnPerturbation):
    """Append distractors of a stated type that move as the world does.

    A perturbation doesn't see the world, so a distractor takes its motion from an
    *anchor*: a token, drawn at reset. It copies the anchor's features at every step
    and stands at a fixed offset from it. Since an offset between two entities doesn't
    depend on who looks at them, the distractor obeys the world's relative coordinates:
    it stands still where its anchor does and approaches when the observer does.

    - ``"alike"``: anchors are tokens of the type that the distractor pretends to be.
      Many distractors spread like the tokens of their type, each blurred by
      ``spread``.
    - ``"far"``: the same anchors, at the stated ``distance`` in a random direction.
    - ``"near"``: the anchor is the observer's own token, blurred by ``spread``. What
      stands where the query does is the hardest to ignore.

    Where no token of the type is present, anchors are any tokens but self, and the
    distractor moves as they do. Where there is none either, or the anchor vanishes,
    the distractor is padded. Each agent is shown distractors of its own.

    N grows by ``round(severity * count)``, halves rounded to even, so a head for a
    fixed N cannot be measured under it. Of two severities the larger one says by how
    much; slots that are not used are padded.

    Args:
        token_type: number of the type, or its name if ``type_names`` are given; None:
            the last of those that are not signal.
        severity: share of ``count``.
        count: how many distractors there are at severity 1.
        place: ``"alike"``, ``"far"`` or ``"near"``.
        spread: half side of the square that offsets are uniform in, in the features'
            own units (in simple-centroid the world's lengths divided by 5).
        distance: of those that are far, from their anchors, in the same units.
        position_features: numbers of the features, from 0, that are a position; None:
            those that ``positions`` tells.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        type_names: of the types that the policy knows.
        signal_types: names of those that matter for the task; empty: not known.
        has_self: whether tokens of type 0 are the observer's own.
        dtype: of the features. A distractor needs a position, and image patches
            (uint8) have none.
        num_features: of a token; None: not known before there are tokens.
        positions: numbers of the features that are a position, () if none is; None:
            not known.

    Raises:
        UnfitTokensError: a type that the tokens lack, tokens without noise or without
            a position, or distractors near an observer that has no token.
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        token_type: NonNegativeInt | str | None = None,
        severity: Severity = 1.0,
        count: PositiveInt = 32,
        place: Literal["alike", "far", "near"] = "alike",
        spread: NonNegativeFloat = 0.1,
        distance: NonNegativeFloat = 2.0,
        position_features: list[NonNegativeInt] | None = None,
        ramp: PositiveInt | None = None,
        type_names: Sequence[str] = (),
        signal_types: Sequence[str] = (),
        has_self: bool = True,
        dtype: Literal["float32", "uint8"] = "float32",
        num_features: PositiveInt | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        super().__init__(severity=severity, ramp=ramp)
        if dtype != "float32":
            raise UnfitTokensError(
                "perturbation inject: expected features with positions, got images"
            )
        if count < 1:
            raise InputError(
                f"perturbation.count: expected at least 1 at severity 1, got {count}"
            )
        if place not in PLACES:
            raise InputError(
                f"perturbation.place: expected {', '.join(PLACES)}, got {place!r}"
            )
        if place == "near" and not has_self:
            raise UnfitTokensError(
                "perturbation.place: near what? These tokens have no token of the "
                "observer's own"
            )
        self.token_type = (
            _type_of_noise(type_names, signal_types)
            if token_type is None
            else _type_number(token_type, type_names)
        )
        self.place, self.most = place, count
        self.count = round(self.high * count)
        self.spread = check_size("spread", spread)
        self.distance = check_size("distance", distance)
        self.positions = _positions(position_features, positions)
        if num_features is not None:
            self._check(num_features)

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw anchors and offsets; see `DrawnPerturbation.draw`."""
        if not tokens.features.dtype.is_floating_point:
            raise InputError("perturbation inject: expected features with positions")
        self._check(tokens.features.shape[-1])
        width = len(self.positions)
        shape = (tokens.types.shape[1], self.most, 1 + width)
        numbers = uniform_like(keys, turn, shape)[:, :, : self.count]
        choice, offset = numbers.split([1, width], -1)
        return {
            "anchor": _pick(self._candidates(tokens), choice[..., 0]),
            "offset": self._offset(offset).to(tokens.features.dtype),
        }

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Pad what is beyond a world's count; see `DrawnPerturbation.settle`."""
        anchor = state["anchor"]
        slots = torch.arange(self.count, device=anchor.device)
        beyond = slots >= (state["severity"] * self.most).round().view(-1, 1, 1)
        origin = torch.cat([own_places(tokens), torch.full_like(anchor, -1)], -1)
        return {"anchor": anchor.masked_fill(beyond, -1), "origin": origin}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Append the distractors; see `DrawnPerturbation.apply`."""
        anchor = state["anchor"].clamp(min=0)
        features = take_features(tokens.features, anchor)
        places = torch.tensor(self.positions, device=anchor.device)
        # Several times faster than an assignment to a list of features.
        features.index_add_(-1, places, state["offset"].to(features.dtype))
        types = torch.full_like(anchor, self.token_type)
        padding = tokens.padding.gather(-1, anchor) | (state["anchor"] < 0)
        return append(tokens, Tokens(features, types, padding))

    def _offset(self, numbers: Tensor) -> Tensor:
        """Offsets from the anchors, by ``numbers`` uniform in (0, 1)."""
        if self.place != "far":
            return (2 * numbers - 1) * self.spread
        # Gaussian numbers have no preferred direction.
        return self.distance * torch.nn.functional.normalize(normal(numbers), dim=-1)

    def _candidates(self, tokens: Tokens) -> Tensor:
        """Tokens that may be anchors, ``(num_envs, agents, N)`` bool."""
        present = ~tokens.padding
        if self.place == "near":
            return present & (tokens.types == SELF_TYPE)
        alike = present & (tokens.types == self.token_type)
        others = present & (tokens.types != SELF_TYPE)
        return torch.where(alike.any(-1, keepdim=True), alike, others)

    def _check(self, num_features: int) -> None:
        check_numbers("position_features", self.positions, num_features)


def _pick(candidates: Tensor, choice: Tensor) -> Tensor:
    """Draw candidates with replacement.

    Args:
        candidates: ``(*B, N)`` bool.
        choice: ``(*B, C)`` uniform in (0, 1).

    Returns:
        ``(*B, C)`` int64 places in N, -1 where the row has no candidate.
    """
    first = (~candidates).byte().argsort(dim=-1, stable=True)
    number = candidates.sum(-1, keepdim=True)
    picked = first.gather(-1, (choice * number).long())
    return picked.masked_fill(number == 0, -1)


def _positions(chosen: Sequence[int] | None, known: Sequence[int] | None) -> list[int]:
    """The features that an offset moves: the user's word, else the tokens' own."""
    if chosen is not None:
        if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
            raise InputError(
                "perturbation.position_features: expected null or different numbers of "
                f"features, got {list(chosen)}"
            )
        return list(chosen)
    if not known:
        raise UnfitTokensError(
            "perturbation.position_features: expected numbers of features, since "
            + (
                "nothing says which features of these tokens are a position"
                if known is None
                else "these tokens have no position"
            )
            + ", got null"
        )
    return list(known)


def _type_of_noise(type_names: Sequence[str], signal_types: Sequence[str]) -> int:
    """The last type that is not signal: before it come those that act, if any."""
    if not signal_types:
        raise UnfitTokensError(
            "perturbation.token_type: expected a type, since nothing says which types "
            "of these tokens are noise, got null"
        )
    noise = [i for i, name in enumerate(type_names) if name not in signal_types]
    if not noise:
        raise UnfitTokensError(
            "perturbation.token_type: expected a type, since none of these tokens' is "
            f"noise, got null: choose from {', '.join(type_names)}"
        )
    return noise[-1]


def _type_number(token_type: int | str, type_names: Sequence[str]) -> int:
    if isinstance(token_type, str):
        if not type_names:
            raise UnfitTokensError(
                f"perturbation.token_type: expected a number, or type_names with it, "
                f"got {token_type!r}"
            )
        if token_type not in type_names:
            refusal = unknown("perturbation.token_type", token_type, type_names)
            raise UnfitTokensError(str(refusal))
        return list(type_names).index(token_type)
    most = len(type_names) - 1 if type_names else token_type
    if not 0 <= token_type <= most:
        raise UnfitTokensError(
            f"perturbation.token_type: expected 0 to {most}, got {token_type}"
        )
    return token_type
