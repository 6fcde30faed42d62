"""Occlude: some tokens are not seen."""

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from marl_pool.errors import InputError, UnfitTokensError
from marl_pool.names import unknown
from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.share import ShareOptions, TokenShare
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import Severity

ANY, SIGNAL, NOISE = "any", "signal", "noise"


class Occlude(TokenShare):
    """Take away exactly ``round(severity * n)`` of n tokens, in each row.

    n counts the tokens present of the kind that is meant, without the protected one.
    The same tokens are missing until the next draw; when one of those present vanishes
    from the world in between, the count is taken anew.

    Args:
        severity: share of the tokens that is taken away. Halves round to even.
        mode: ``"drop"`` pads them: they are known to be missing. ``"zero"`` sets
            their features to 0 and lets them stand, as a dead sensor does. Where
            features are relative to the observer, 0 says *an entity on top of me*:
            a lie, not an absence.
        among: which tokens are meant: ``"any"``, ``"signal"`` (those of the types that
            matter for the task), ``"noise"`` (the others), or names of types.
        protect_self: leave the observer's own token alone.
        every: steps from one draw to the next; None draws at reset only.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        type_names: of the types that the policy knows.
        signal_types: names of those that matter for the task.

    Raises:
        UnfitTokensError: a type that the tokens lack, or types that don't tell signal
            from noise.
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

    def eligible(self, tokens: Tokens) -> Tensor:
        """The tokens that may be missing, ``(num_envs, agents, N)`` bool."""
        eligible = super().eligible(tokens)
        if self.kinds is None:
            return eligible
        kinds = torch.tensor(self.kinds, device=tokens.types.device)
        return eligible & torch.isin(tokens.types, kinds)

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Take the tokens away; see `DrawnPerturbation.apply`."""
        features, types, padding = tokens
        missing = self.chosen(tokens, state)
        if self.mode == "drop":
            return Tokens(features, types, padding | missing)
        zeroed = torch.where(missing[..., None], 0, features).to(features.dtype)
        return Tokens(zeroed, types, padding)


def _type_numbers(
    among: str | Sequence[str], type_names: Sequence[str], signal_types: Sequence[str]
) -> list[int] | None:
    """The types that are meant, None for all."""
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
            f"perturbation.among: {among} is unknown here: the types of these tokens "
            "don't tell signal from noise"
        )
    kinds = [n for n in type_names if (n in signal_types) == (among == SIGNAL)]
    # Nothing but the observer's own token would be no occlusion at all.
    if not set(kinds) - {type_names[SELF_TYPE]}:
        raise UnfitTokensError(f"perturbation.among: no type of tokens here is {among}")
    return kinds
