"""Perturbations of the order: tokens change places, or show others' features."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import Repeats, Seed, Severity
from marl_pool.perturbations.base import PerturbationState, TokenShare
from marl_pool.perturbations.sampling import uniform_like
from marl_pool.tokens import SELF_TYPE, Tokens, take_features
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import Purpose, stream_keys


@dataclass(kw_only=True, eq=False)
class Shuffle(TokenShare):
    """Permute tokens: features, types and padding move together.

    With ``scope="token"`` whole tokens move. The set stays the same, so a
    permutation-invariant policy notices nothing, unless it has a memory for each
    position, as `AttentionNeuronPooling` does: it is then paired with another token.

    With ``scope="frame"`` each frame is permuted before it is stacked, as in a sensor
    array that is rewired while it runs: for ``num_frames - 1`` steps after a
    permutation a token combines frames of different places, and even an invariant
    policy without a memory is affected. Frames before the first one have its order, so
    with ``every=None`` both scopes are the same. Types and padding move with the newest
    frame.

    Source: the shuffle tests of AttentionNeuron (Tang and Ha, 2021,
    https://arxiv.org/abs/2109.02869, section 4.1 and Table 6). Its published code
    permutes the screens of Pong and CarRacing frame by frame, then stacks them.

    Args:
        severity: share of the slots, padded ones included, that take part in the
            permutation.
        scope: what is permuted, ``"token"`` or ``"frame"``.
        held: seed of one permutation that all environments, agents and episodes share,
            in this run and any other, or None for a new permutation for each.
        num_frames: observations that a token's features stack; see `TokenSpec`.

    Raises:
        UnfitTokensError: ``scope="frame"`` for tokens that show a single frame.
    """

    label: ClassVar[str] = "shuffled"
    severity: Severity = 1.0
    scope: Literal["token", "frame"] = "token"
    held: Seed | None = None
    protect_self: bool = False
    num_frames: Repeats = 1

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held is not None and self.every is not None:
            raise InputError(
                f"perturbation.held: expected null where perturbation.every is given, "
                f"got {self.held} and {self.every}"
            )
        if self.scope == "frame" and self.num_frames < 2:
            raise UnfitTokensError(
                "perturbation.scope: expected token, since these tokens show a single "
                "frame, got frame"
            )
        # Frames that are permuted at different times make new tokens.
        self.reorders = self.scope == "token" or self.every is None

    @override
    def eligible(self, tokens: Tokens) -> Tensor:
        if self.protects:
            return (tokens.types != SELF_TYPE) | tokens.padding
        return torch.ones_like(tokens.padding)

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        if self.held is None:
            return super().sample(tokens, keys, turn)
        # One order for all environments and episodes, so the key has no number of
        # either.
        only = torch.zeros_like(keys[:1])
        key = stream_keys(self.held, only, only, Purpose.PERTURBATION)
        scores = uniform_like(key, only, (1, tokens.num_tokens))
        return {"scores": scores.expand_as(tokens.types).contiguous()}

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        moving = super().apply_severity(tokens, state)["chosen"]
        origin = permutation(state["scores"], moving)
        if self.scope == "token":
            return {"origin": origin}
        stack = origin[:, :, None].repeat(1, 1, self.num_frames, 1)
        if "origins" in state:
            # Within an episode, older frames keep their order.
            begins = (state["steps"] == 0).view(-1, 1, 1, 1)
            stack = torch.where(begins, stack, state["origins"])
        return {"origin": origin, "origins": stack}

    @override
    def update(self, state: PerturbationState) -> PerturbationState:
        """Push the newest frame's order onto the stack of orders."""
        if self.scope == "token":
            return state
        # (num_envs, agents, num_frames, N), oldest first like the frames.
        newest = state["origin"][:, :, None]
        return {**state, "origins": torch.cat([state["origins"][:, :, 1:], newest], 2)}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        origin = state["origin"]
        if self.scope == "token":
            features = take_features(tokens.features, origin)
        else:
            # A slot that is padded now may hold an older frame of a token.
            masked_features = tokens.features.masked_fill(tokens.padding[..., None], 0)
            frames = masked_features.unflatten(-1, (self.num_frames, -1))
            # (num_envs, agents, num_frames, N, …): each frame has a separate order.
            moved = take_features(frames.transpose(-3, -2), state["origins"])
            features = moved.transpose(-3, -2).flatten(-2)
        return tokens._replace(
            features=features,
            types=tokens.types.gather(-1, origin),
            padding=tokens.padding.gather(-1, origin),
        )


@dataclass(kw_only=True, eq=False)
class Rewire(TokenShare):
    """Permute the features of the tokens present: crossed wires.

    Types and padding stay. Unlike a shuffle this changes the set, and no policy without
    memory can undo it. When a token vanishes, the token that shows its features is
    padded too.

    Args:
        severity: share of the tokens present that take part in the permutation.
    """

    label: ClassVar[str] = "rewired"
    severity: Severity = 1.0
    protect_self: bool = False

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        crossed = super().apply_severity(tokens, state)["chosen"]
        return {"origin": permutation(state["scores"], crossed)}

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        origin, padding = state["origin"], tokens.padding
        return tokens._replace(
            features=take_features(tokens.features, origin),
            padding=padding | padding.gather(-1, origin),
        )


def permutation(scores: Tensor, taking_part: Tensor) -> Tensor:
    """Permute the slots that take part; the others stay.

    Args:
        scores: ``(*B, N)``, without ties; if random, all permutations are equally
            likely.
        taking_part: ``(*B, N)`` bool.

    Returns:
        ``(*B, N)`` int64: for each slot, the index of the slot whose content it gets.
    """
    # The slots that take part, by score and by place: the i-th slot by place gets the
    # content of the i-th by score.
    by_score = scores.masked_fill(~taking_part, torch.inf).argsort(-1)
    by_place = (~taking_part).byte().argsort(dim=-1, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    moved = places < taking_part.sum(-1, keepdim=True)
    source = torch.where(moved, by_score, by_place)
    return torch.empty_like(source).scatter_(-1, by_place, source)
