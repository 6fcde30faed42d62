"""Occlude: missing tokens."""

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.share import ShareOptions, TokenShare
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.names import unknown
from marl_pool.utils.types import Severity

ANY, SIGNAL, NOISE = "any", "signal", "noise"


class Occlude(TokenShare):
    """Remove exactly ``round(severity * n)`` of n tokens in each row.

    n counts the tokens present of the kinds in ``among``, without a protected one. The
    same tokens are missing until the next resampling; when a token present vanishes
    from the environment in between, the number is computed again.

    Args:
        severity: share of the removed tokens; halves round to even.
        mode: ``"drop"`` pads them, so that the policy knows that they are missing.
            ``"zero"`` sets their features to 0, as a dead sensor does. Where features
            are relative to the observer, 0 is the position of the observer.
        among: kinds of tokens: ``"any"``, ``"signal"`` (types that matter for the
            task), ``"noise"`` (the other types), or names of types.
        protect_self: leave the observer's own token unchanged.
        every: steps between resamplings; None: at reset only.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        type_names: names of the types known to the policy.
        signal_types: names of the types that matter for the task.

    Raises:
        UnfitTokensError: a type that the tokens lack, or types without a distinction
            between signal and noise.
        InputError: an unknown mode or a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity = 0.5,
        mode: Literal["drop", "zero"] = "drop",
        among: Literal["any", "signal", "noise"] | list[str] = "any",
        protect_self: bool = True,
        type_names: Sequence[str] = (),
        signal_types: Sequence[str] = (),
        **common: Unpack[ShareOptions],
    ) -> None:
        super().__init__(severity=severity, protect_self=protect_self, **common)
        self.mode = mode
        self.kinds = _type_numbers(among, type_names, signal_types)

    @override
    def eligible(self, tokens: Tokens) -> Tensor:
        eligible = super().eligible(tokens)
        if self.kinds is None:
            return eligible
        kinds = torch.tensor(self.kinds, device=tokens.types.device)
        return eligible & torch.isin(tokens.types, kinds)

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        features, types, padding = tokens
        missing = self.chosen(tokens, state)
        if self.mode == "drop":
            return Tokens(features, types, padding | missing)
        zeroed = torch.where(missing[..., None], 0, features).to(features.dtype)
        return Tokens(zeroed, types, padding)


def _type_numbers(
    among: str | Sequence[str], type_names: Sequence[str], signal_types: Sequence[str]
) -> list[int] | None:
    """Return the types in ``among``, None for all."""
    if among == ANY:
        return None
    if isinstance(among, str):
        names = _signal_or_noise(among, type_names, signal_types)
    else:
        names = list(among)
    if not names:
        raise InputError("perturbation.among: expected at least one type, got none")
    numbers = {name: number for number, name in enumerate(type_names)}
    for name in names:
        if name not in numbers:
            refusal = unknown("perturbation.among", name, numbers or [ANY])
            raise UnfitTokensError(str(refusal))
    return [numbers[name] for name in names]


def _signal_or_noise(
    among: str, type_names: Sequence[str], signal_types: Sequence[str]
) -> list[str]:
    if among not in (SIGNAL, NOISE):
        raise InputError(
            f"perturbation.among: expected any, signal, noise or a list of types, "
            f"got {among!r}"
        )
    if not signal_types:
        raise UnfitTokensError(
            "perturbation.among: expected any or names of types, since these tokens do "
            f"not distinguish signal from noise, got {among}"
        )
    kinds = [n for n in type_names if (n in signal_types) == (among == SIGNAL)]
    # The observer's own token alone leaves nothing to occlude.
    if not set(kinds) - {type_names[SELF_TYPE]}:
        raise UnfitTokensError(f"perturbation.among: no type of tokens here is {among}")
    return kinds
