"""Shuffle: tokens change places."""

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.draws import uniform_like
from marl_pool.perturbations.selection import permutation, take_features
from marl_pool.perturbations.share import TokenShare
from marl_pool.randomness import Purpose, stream_keys
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import PositiveInt, Seed, Severity


class Shuffle(TokenShare):
    """Permute whole tokens: features, types and padding move together.

    The set stays the same, so a permutation-invariant policy notices nothing.

    Source: the shuffle test of AttentionNeuron (Tang and Ha, 2021, section 4.1),
    whose sensors carry no type.

    Args:
        severity: share of the slots, padded ones included, that take part in the
            permutation.
        every: steps from one permutation to the next; None permutes at reset only.
        held: seed of one permutation that all worlds, agents and episodes share, now
            and in any other run; None draws a new one for each.
        carry_memory: what a policy remembers of a token by itself goes with it to its
            new place; else it stays, as published, and meets another token there.
        protect_self: leave the observer's own token in its place.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.

    Raises:
        InputError: ``held`` together with ``every``, ``carry_memory`` without it, or a
            number out of range.
    """

    reorders = True

    def __init__(
        self,
        *,
        severity: Severity = 1.0,
        every: PositiveInt | None = None,
        held: Seed | None = None,
        carry_memory: bool = False,
        protect_self: bool = False,
        ramp: PositiveInt | None = None,
        has_self: bool = True,
    ) -> None:
        super().__init__(
            severity=severity,
            protect_self=protect_self,
            every=every,
            ramp=ramp,
            has_self=has_self,
        )
        if held is not None and every is not None:
            raise InputError(
                f"perturbation.held: expected null where perturbation.every is given, "
                f"got {held} and {every}"
            )
        if held is not None and not 0 <= held < 1 << 63:
            raise InputError(
                f"perturbation.held: expected null or an integer in [0, 2**63), "
                f"got {held}"
            )
        if carry_memory and every is None:
            raise InputError(
                "perturbation.carry_memory: expected false where perturbation.every is "
                f"null, got {carry_memory}"
            )
        self.held, self.carry_memory = held, carry_memory

    def moved(
        self, before: PerturbationState, after: PerturbationState
    ) -> Tensor | None:
        """The places, if memories are carried; see `Perturbation.moved`."""
        if not self.carry_memory or after["origin"] is before["origin"]:
            return None
        return before["origin"].argsort(-1).gather(-1, after["origin"])

    def eligible(self, tokens: Tokens) -> Tensor:
        """All slots, or all but the observer's own, ``(num_envs, agents, N)`` bool."""
        if self.protects:
            return (tokens.types != SELF_TYPE) | tokens.padding
        return torch.ones_like(tokens.padding)

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw a number for each slot; see `DrawnPerturbation.draw`."""
        if self.held is None:
            return super().draw(tokens, keys, turn)
        only = torch.zeros_like(keys[:1])
        key = stream_keys(self.held, only, only, Purpose.PERTURBATION)
        scores = uniform_like(key, only, (1, tokens.num_tokens))
        return {"scores": scores.expand_as(tokens.types).contiguous()}

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Make a permutation for each agent; see `DrawnPerturbation.settle`."""
        moving = super().settle(tokens, state)["chosen"]
        return {"origin": permutation(state["scores"], moving)}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Permute; see `DrawnPerturbation.apply`."""
        origin = state["origin"]
        return Tokens(
            take_features(tokens.features, origin),
            tokens.types.gather(-1, origin),
            tokens.padding.gather(-1, origin),
        )
