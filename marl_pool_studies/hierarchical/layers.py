"""Encoder and decoder: one layer each, which merges or unmerges tokens repeatedly.

The encoder is not a `marl_pool.encoders.base.Encoder`, which keeps the number of
tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.merging import (
    MergingLayer,
    MergingPolicy,
    Refinement,
    merging_mlp,
    timestep_encoding,
)
from marl_pool.encoders.pairs import (
    Pairs,
    choose_pairs,
    choose_tokens,
    gather_tokens,
    gumbel,
    pair_log_prob,
    token_log_prob,
)
from marl_pool.encoders.transformer import TransformerLayer
from marl_pool.kernels.attention import validate_heads
from marl_pool.options.types import NonNegativeFloat, Probability, Repeats, Size
from marl_pool.utils.errors import InputError


@dataclass(kw_only=True, eq=False)
class Hierarchy:
    """Settings of a hierarchical transformer.

    Source: Nair and Lieck, section 3 and Table 3, whose values are the defaults, except
    their dropout of 0.1. Hidden widths, not published, are four times a token's width.

    Raises:
        InputError: contradictory settings.
    """

    dim: Size = 256
    """Width of a token."""
    num_heads: Repeats = 8
    """Attention heads, a divisor of ``dim``."""
    policy_heads: Repeats = 1
    """Heads of the merging policy, a divisor of ``dim``."""
    dropout: Probability = 0.0
    """Dropout probability in the feed-forward parts."""
    policy: MergingPolicy = "learned"
    """Choice of the pairs to merge; see `MergingLayer`."""
    attention: bool = True
    """Use transformer blocks and cross-attention."""
    log_prob: Literal["masked", "unmasked"] = "masked"
    """masked: probability of the sampling procedure; unmasked: the paper's."""
    gradient: Literal["reinforce", "scaling"] = "reinforce"
    """Gradient of the choices: reinforce, or scaling by probabilities (A.4)."""
    through_tokens: bool = False
    """Propagate the score's gradient into the tokens that the policy observes."""
    token_noise: NonNegativeFloat = 0.0
    """Standard deviation of noise on a layer's input tokens, in training (3.2.1)."""

    def __post_init__(self) -> None:
        # Attention splits the width among its heads.
        for name in ("num_heads", "policy_heads"):
            validate_heads(f"task.{name}", getattr(self, name), self.dim)
        # These policies read the keys of the attention.
        if not self.attention and self.policy in ("shared_keys", "heuristic"):
            raise InputError(
                f"task.policy: expected learned or random without attention, "
                f"got {self.policy}"
            )
        # Scaling multiplies by a probability, which only these policies learn.
        if self.is_scaled and self.policy not in ("learned", "shared_keys"):
            raise InputError(
                "task.gradient: expected reinforce with a policy that is not learned, "
                f"got scaling with {self.policy}"
            )

    @property
    def is_scaled(self) -> bool:
        """True if outputs are scaled by the probabilities of the choices."""
        return self.gradient == "scaling"


class Chance(NamedTuple):
    """Source and mode of random choices."""

    generator: torch.Generator
    """Source of all random numbers."""
    explore: bool
    """True: sample, as in training; False: take the most probable. A random policy
    always samples."""


class LayerOutput(NamedTuple):
    """Output of a layer."""

    tokens: Tensor
    """``(B, S, D)``; the R new ones are last (2 R after unmerging: the first halves,
    then the second ones)."""
    unchanged: Tensor
    """``(B, T')`` int64, indices of the unchanged input tokens, which are first."""
    log_prob: Tensor
    """``(B,)``, log-probability of the choices; without a gradient with
    ``gradient="scaling"``."""
    norm: Tensor
    """``(B,)``, mean squared norm of the input tokens."""
    pairs: Pairs | None = None
    """Merged pairs of an encoder's layer."""


class NetworkOutput(NamedTuple):
    """Output of a stack of layers, or of a network with such stacks."""

    output: Tensor
    """Tokens ``(B, S, D)``, images ``(B, H, W, C)`` or logits ``(B, K)``."""
    log_prob: Tensor
    """``(B,)``, log-probability of all choices."""
    norm: Tensor
    """``(B,)``, squared norm of the tokens, summed over layers."""


class LayerStack(nn.Module):
    """Base of encoder and decoder: layers that share their weights."""

    backwards: ClassVar[bool] = False
    """Apply the layers of a schedule from the last to the first."""

    def __init__(self, settings: Hierarchy) -> None:
        super().__init__()
        self.settings, self.masked = settings, settings.log_prob == "masked"

    def forward(
        self, x: Tensor, schedule: Sequence[int], chance: Chance
    ) -> NetworkOutput:
        """Apply all layers to ``x (B, T, D)``.

        ``schedule`` has the number of pairs that each layer merges or restores.
        """
        log_prob = norm = torch.zeros(len(x), device=x.device)
        layers = list(enumerate(schedule, 1))
        for depth, count in reversed(layers) if self.backwards else layers:
            step = self.step(x, depth, count, chance)
            x = step.tokens
            log_prob, norm = log_prob + step.log_prob, norm + step.norm
        return NetworkOutput(x, log_prob, norm)

    @abstractmethod
    def step(self, x: Tensor, depth: int, count: int, chance: Chance) -> LayerOutput:
        """Apply one layer to tokens ``x (B, T, D)`` without padding.

        ``depth`` counts the encoder's layers, from 1, also in the decoder; ``count``
        is R, the pairs to merge or tokens to unmerge.
        """

    def entrance(
        self, x: Tensor, depth: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Add the encoding of a layer's depth, and noise in training.

        Return the tokens ``(B, T, D)`` and their mean squared norm ``(B,)``.
        Source: Nair and Lieck, section 3.1.2, equations 5 to 7.
        """
        x = x + timestep_encoding(depth, self.settings.dim).to(x)
        if self.training and self.settings.token_noise:
            noise = torch.randn(
                x.shape, generator=generator, device=generator.device, dtype=x.dtype
            )
            x = x + self.settings.token_noise * noise.to(x.device)
        return x, x.square().sum(-1).mean(-1)

    def scaled(self, new: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Scale new tokens by probabilities, if the settings ask for it (A.4)."""
        if not self.settings.is_scaled:
            return new, log_probs
        return new * log_probs.exp()[..., None].to(new.dtype), log_probs.detach()


class HierarchicalEncoder(LayerStack):
    """Transformer block, merge, refine: the same weights in each layer.

    Source: Nair and Lieck, section 3.1.2.
    """

    def __init__(self, settings: Hierarchy) -> None:
        super().__init__(settings)
        self.layer = MergingLayer(
            settings.dim,
            num_heads=settings.num_heads,
            policy_heads=settings.policy_heads,
            dim_ff=4 * settings.dim,
            dropout=settings.dropout,
            policy=settings.policy,
            attention=settings.attention,
            through_tokens=settings.through_tokens or settings.is_scaled,
        )

    @override
    def step(self, x: Tensor, depth: int, count: int, chance: Chance) -> LayerOutput:
        # Score all pairs, and choose some; Gumbel noise samples from the softmax.
        x, norm = self.entrance(x, depth, chance.generator)
        x, logits = self.layer.transform(x)
        scores = logits.detach()
        if chance.explore or self.settings.policy == "random":
            scores = scores + gumbel(scores, chance.generator)
        pairs = choose_pairs(scores, count)
        log_probs = pair_log_prob(logits, pairs, masked=self.masked)
        merged, log_probs = self.scaled(self.layer.merged(x, pairs), log_probs)
        # Append the merged tokens to the unchanged ones, then refine all.
        unchanged = others(torch.cat(pairs[:2], 1), x.shape[1])
        new = torch.cat([gather_tokens(x, unchanged), merged], 1)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x)
        return LayerOutput(new, unchanged, log_probs.sum(1), norm, pairs)


class HierarchicalDecoder(LayerStack):
    """Unmerge, refine, transformer block: the same weights in each layer.

    The tokens to unmerge are sampled without replacement from the softmax of their
    scores; if all are unmerged, the log-probability is 0. A layer receives the encoding
    of the depth of the encoder's layer that it reverses. ``settings.policy`` has no
    effect here.

    Source: Nair and Lieck, section 3.1.3. Difference: scores are of layer-normalized
    tokens.
    """

    backwards = True

    def __init__(self, settings: Hierarchy) -> None:
        super().__init__(settings)
        dim, wide = settings.dim, 4 * settings.dim
        self.score_norm, self.score = nn.LayerNorm(dim), merging_mlp(dim, 1, dim)
        self.unmerge = merging_mlp(dim, 2 * dim, wide)
        self.refine: Refinement | None = None
        self.block: TransformerLayer | None = None
        if settings.attention:
            self.refine = Refinement(dim, settings.num_heads)
            self.block = TransformerLayer(
                dim, settings.num_heads, wide, settings.dropout, "head", "gelu"
            )

    @override
    def step(
        self,
        x: Tensor,
        depth: int,
        count: int,
        chance: Chance,
        forced: Tensor | None = None,
    ) -> LayerOutput:
        """Apply the layer that reverses layer ``depth``.

        With ``forced (B, R)``, the indices of the tokens to unmerge, for teacher
        forcing, ``log_prob`` is the mean log-probability of choosing each.
        """
        x, norm = self.entrance(x, depth, chance.generator)
        logits = self._logits(x)
        if forced is None:
            scores = logits.detach()
            if chance.explore:
                scores = scores + gumbel(scores, chance.generator)
            indices = choose_tokens(scores, count)
        else:
            indices = forced
        log_probs = token_log_prob(logits, indices, masked=self.masked)
        # If all tokens are chosen, there is no choice to credit.
        if count == x.shape[1]:
            log_probs = torch.zeros_like(log_probs)
        # Split each chosen token in two.
        halves = self.unmerge(gather_tokens(x, indices))
        halves, log_probs = self.scaled(halves, log_probs)
        log_prob = log_probs.sum(1)
        # Teacher forcing trains the choice itself, by its mean log-likelihood.
        if forced is not None:
            log_prob = token_log_prob(logits, forced, masked=False).sum(1)
            log_prob = log_prob / max(count, 1)
        # Append the new tokens to the unchanged ones, then refine all.
        unchanged = others(indices, x.shape[1])
        new = torch.cat([gather_tokens(x, unchanged), *halves.chunk(2, -1)], 1)
        if self.refine is not None and self.block is not None:
            new = self.block(self.refine(new, x))
        return LayerOutput(new, unchanged, log_prob, norm)

    def _logits(self, x: Tensor) -> Tensor:
        if not (self.settings.through_tokens or self.settings.is_scaled):
            x = x.detach()
        logits = self.score(self.score_norm(x))[..., 0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def others(places: Tensor, size: int) -> Tensor:
    """Return the indices below ``size`` that are not in ``places (B, R)``, in order."""
    # A stable sort puts unused indices first, in order.
    used = torch.zeros(len(places), size, device=places.device, dtype=torch.uint8)
    used = used.scatter(1, places, 1)
    return used.argsort(dim=1, stable=True)[:, : size - places.shape[1]]
