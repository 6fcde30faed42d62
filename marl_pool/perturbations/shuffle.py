"""Shuffle: tokens change places."""

from typing import Literal, Unpack

import torch
from torch import Tensor

from marl_pool.errors import InputError, UnfitTokensError
from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.draws import uniform_like
from marl_pool.perturbations.selection import permutation, take_features
from marl_pool.perturbations.share import RampOptions, TokenShare
from marl_pool.randomness import Purpose, stream_keys
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import PositiveInt, Seed, Severity


class Shuffle(TokenShare):
    """Permute tokens: features, types and padding move together.

    With ``scope="token"`` whole tokens move. The set stays the same, so a
    permutation-invariant policy notices nothing, at least if it has no memory of
    single tokens.

    With ``scope="frame"`` each frame is permuted before it is stacked, as a sensor
    array would be whose wires are exchanged while it runs: after a new order, and until
    the stack holds no older frame, a token joins frames of different places, and even
    an invariant policy without a memory notices. Frames before the first one have its
    order. So with ``every=None`` both scopes are the same, and ``num_frames - 1`` steps
    after a new order they agree again. Types and padding move with the newest frame.

    Source: the shuffle tests of AttentionNeuron (Tang and Ha, 2021, section 4.1 and
    Table 6), whose sensors carry no type. There Pong's and CarRacing's screens are
    permuted frame by frame: the published code permutes a frame, then stacks it. What
    changes the order within an episode is not published.

    Args:
        severity: share of the slots, padded ones included, that take part in the
            permutation.
        every: steps from one permutation to the next; None permutes at reset only.
        scope: what is permuted, ``"token"`` or ``"frame"``.
        held: seed of one permutation that all worlds, agents and episodes share, now
            and in any other run; None draws a new one for each.
        carry_memory: what a policy remembers of a token by itself goes with it to its
            new place; else it stays, as published, and meets another token there.
        protect_self: leave the observer's own token in its place.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        num_frames: observations that a token's features stack; see `TokenSpec`.

    Raises:
        UnfitTokensError: ``scope="frame"`` for tokens that show a single frame.
        InputError: ``held`` together with ``every``, ``carry_memory`` without it, an
            unknown scope, or a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity = 1.0,
        every: PositiveInt | None = None,
        scope: Literal["token", "frame"] = "token",
        held: Seed | None = None,
        carry_memory: bool = False,
        protect_self: bool = False,
        num_frames: PositiveInt = 1,
        **common: Unpack[RampOptions],
    ) -> None:
        super().__init__(
            severity=severity, protect_self=protect_self, every=every, **common
        )
        if held is not None and every is not None:
            raise InputError(
                f"perturbation.held: expected null where perturbation.every is given, "
                f"got {held} and {every}"
            )
        if carry_memory and every is None:
            raise InputError(
                "perturbation.carry_memory: expected false where perturbation.every is "
                f"null, got {carry_memory}"
            )
        if scope == "frame" and num_frames < 2:
            raise UnfitTokensError(
                "perturbation.scope: expected token, since these tokens show a single "
                "frame, got frame"
            )
        self.held, self.carry_memory = held, carry_memory
        self.scope, self.num_frames = scope, num_frames
        # Frames that change places at different times make other tokens.
        self.reorders = scope == "token" or every is None

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
        origin = permutation(state["scores"], moving)
        if self.scope == "token":
            return {"origin": origin}
        stack = origin[:, :, None].repeat(1, 1, self.num_frames, 1)
        if "origins" in state:
            # In the middle of an episode, older frames keep the order they came in.
            begins = (state["steps"] == 0).view(-1, 1, 1, 1)
            stack = torch.where(begins, stack, state["origins"])
        return {"origin": origin, "origins": stack}

    def follow(self, state: PerturbationState) -> PerturbationState:
        """Push the newest frame's order onto the stack of orders."""
        if self.scope == "token":
            return state
        # (num_envs, agents, num_frames, N), oldest first like the frames themselves.
        newest = state["origin"][:, :, None]
        return {**state, "origins": torch.cat([state["origins"][:, :, 1:], newest], 2)}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Permute; see `DrawnPerturbation.apply`."""
        origin = state["origin"]
        if self.scope == "token":
            features = take_features(tokens.features, origin)
        else:
            # A slot that is padded now may have an older frame of a token.
            known = tokens.features.masked_fill(tokens.padding[..., None], 0)
            frames = known.unflatten(-1, (self.num_frames, -1))
            moved = take_features(frames.transpose(-3, -2), state["origins"])
            features = moved.transpose(-3, -2).flatten(-2)
        return Tokens(
            features, tokens.types.gather(-1, origin), tokens.padding.gather(-1, origin)
        )
