"""Occlude: missing tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perception import Perception
from marl_pool.perturbations.base import PerturbationState, TokenShare
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.names import unknown
from marl_pool.utils.types import Severity


@dataclass(kw_only=True, eq=False)
class Occlude(TokenShare):
    """Remove exactly ``round(severity * n)`` of n tokens in each row.

    n counts the tokens present of the kinds in ``among``, without a protected one. The
    same tokens are missing until the next resampling; when a token vanishes from the
    environment in between, the number is computed again.

    Args:
        severity: share of the removed tokens; halves round to even.
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

    word: ClassVar[str] = "occluded"
    severity: Severity = 0.5
    mode: Literal["drop", "zero"] = "drop"
    among: Literal["any", "signal", "noise"] | list[str] = "any"
    type_names: Sequence[str] = ()
    signal_types: Sequence[str] = ()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds = _type_numbers(self.among, self.type_names, self.signal_types)

    @override
    def eligible(self, tokens: Tokens) -> Tensor:
        eligible = super().eligible(tokens)
        if self.kinds is None:
            return eligible
        kinds = constant(tuple(self.kinds), tokens.types.device)
        return eligible & torch.isin(tokens.types, kinds)

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        features, types, padding = tokens
        missing = self.chosen(tokens, state)
        if self.mode == "drop":
            return Tokens(features, types, padding | missing)
        zeroed = torch.where(missing[..., None], 0, features).to(features.dtype)
        return Tokens(zeroed, types, padding)

    @override
    def perceive(
        self, true: Tokens, seen: Tokens, state: PerturbationState
    ) -> Perception:
        # A dead sensor's zeros tell nothing of its token either.
        perceived = super().perceive(true, seen, state)
        missing = self.chosen(true, state)
        affected = self.affected(state["steps"] - 1, true.types.shape[1])
        if affected is not None:
            missing = missing & affected[..., None]  # the state keeps its own
        return replace(perceived, removed=perceived.removed | missing)


def _type_numbers(
    among: str | Sequence[str], type_names: Sequence[str], signal_types: Sequence[str]
) -> list[int] | None:
    """Return the types in ``among``, None for all."""
    if among == "any":
        return None
    names = list(among)
    if isinstance(among, str):
        names = _signal_or_noise(among, type_names, signal_types)
    if not names:
        raise InputError("perturbation.among: expected at least one type, got none")
    for name in names:
        if name not in type_names:
            refusal = unknown("perturbation.among", name, type_names or ["any"])
            raise UnfitTokensError(str(refusal))
    return [list(type_names).index(name) for name in names]


def _signal_or_noise(
    among: str, type_names: Sequence[str], signal_types: Sequence[str]
) -> list[str]:
    if not signal_types:
        raise UnfitTokensError(
            "perturbation.among: expected any or names of types, since these tokens do "
            f"not distinguish signal from noise, got {among}"
        )
    kinds = [n for n in type_names if (n in signal_types) == (among == "signal")]
    # The observer's own token alone leaves nothing to occlude.
    if not set(kinds) - {type_names[SELF_TYPE]}:
        raise UnfitTokensError(f"perturbation.among: no type of tokens here is {among}")
    return kinds
