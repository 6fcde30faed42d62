"""Encoder: one merging layer, applied until few tokens are left.

It is not a `marl_pool.encoders.base.Encoder`, which keeps the number of tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.encoders.merging import MergingLayer, timestep_encoding
from marl_pool.encoders.pairs import (
    Pairs,
    choose_pairs,
    gather_tokens,
    gumbel,
    pair_log_prob,
)
from marl_pool.studies.hierarchical.settings import Hierarchy


class Chance(NamedTuple):
    """Source and mode of random choices.

    Attributes:
        generator: source of all random numbers.
        explore: True: sample, as in training; False: take the most probable. A random
            policy always samples.
    """

    generator: torch.Generator
    explore: bool


class LayerOutput(NamedTuple):
    """Output of a layer.

    Attributes:
        tokens: ``(B, S, D)``; the R new ones are last (2 R after unmerging: the first
            halves, then the second ones).
        rest: ``(B, T')`` int64, indices of the unchanged input tokens, which are first.
        log_prob: ``(B,)``, log-probability of the choices; without a gradient with
            ``gradient="scaling"``.
        norm: ``(B,)``, mean squared norm of the input tokens.
    """

    tokens: Tensor
    rest: Tensor
    log_prob: Tensor
    norm: Tensor


class Encoded(NamedTuple):
    """Output of a stack of layers.

    Attributes:
        tokens: ``(B, S, D)``.
        log_prob: ``(B,)``, the sum over layers.
        norm: ``(B,)``, the sum over layers; see `LayerOutput`.
    """

    tokens: Tensor
    log_prob: Tensor
    norm: Tensor


class Entrance(nn.Module):
    """Input transformation of a layer: add the encoding of its depth, and noise.

    Source: Nair and Lieck, section 3.1.2, equations 5 to 7.

    Args:
        dim: D, width of a token.
        noise: standard deviation of Gaussian noise, in training only.
    """

    def __init__(self, dim: int, noise: float) -> None:
        super().__init__()
        self.dim, self.noise = dim, noise

    def forward(
        self, x: Tensor, depth: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens ``(B, T, D)`` and their mean squared norm ``(B,)``."""
        x = x + timestep_encoding(depth, self.dim).to(x)
        if self.training and self.noise:
            noise = torch.randn(
                x.shape, generator=generator, device=generator.device, dtype=x.dtype
            )
            x = x + self.noise * noise.to(x.device)
        return x, x.square().sum(-1).mean(-1)


class HierarchicalEncoder(nn.Module):
    """Transformer block, merge, refine: the same weights in each layer.

    Source: Nair and Lieck, section 3.1.2.

    Args:
        settings: settings of the hierarchical transformer.
    """

    def __init__(self, settings: Hierarchy) -> None:
        super().__init__()
        self.settings = settings
        self.entrance = Entrance(settings.dim, settings.token_noise)
        self.layer = MergingLayer(
            settings.dim,
            num_heads=settings.num_heads,
            policy_heads=settings.policy_heads,
            dim_ff=4 * settings.dim,
            dropout=settings.dropout,
            policy=settings.policy,
            attention=settings.attention,
            through_tokens=settings.through_tokens or settings.gradient == "scaling",
        )

    def forward(self, x: Tensor, schedule: Sequence[int], chance: Chance) -> Encoded:
        """Merge ``x (B, T, D)``.

        Args:
            x: tokens, without padding.
            schedule: pairs to merge in each layer.
            chance: source and mode of the choices.
        """
        log_prob = norm = torch.zeros(len(x), device=x.device)
        for depth, count in enumerate(schedule, 1):
            step, _ = self.step(x, depth, count, chance)
            x = step.tokens
            log_prob, norm = log_prob + step.log_prob, norm + step.norm
        return Encoded(x, log_prob, norm)

    def step(
        self, x: Tensor, depth: int, count: int, chance: Chance
    ) -> tuple[LayerOutput, Pairs]:
        """Apply layer ``depth``, from 1; return its pairs, too."""
        # Score all pairs, and choose some; Gumbel noise samples from the softmax.
        x, norm = self.entrance(x, depth, chance.generator)
        x, logits = self.layer.transform(x)
        scores = logits.detach()
        if chance.explore or self.settings.policy == "random":
            scores = scores + gumbel(scores, chance.generator)
        pairs = choose_pairs(scores, count)
        log_probs = pair_log_prob(logits, pairs, masked=self.settings.masked)
        # Merge each pair; scale outputs by probabilities (A.4).
        merged = self.layer.merged(x, pairs)
        if self.settings.gradient == "scaling":
            merged = merged * log_probs.exp()[..., None].to(merged.dtype)
            log_probs = log_probs.detach()
        # Append the merged tokens to the unchanged ones, then refine all.
        rest = others(torch.cat(pairs[:2], 1), x.shape[1])
        new = torch.cat([gather_tokens(x, rest), merged], 1)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x)
        return LayerOutput(new, rest, log_probs.sum(1), norm), pairs

    @torch.no_grad()
    def first_policy(self, x: Tensor, chance: Chance) -> Tensor:
        """Compute the first merge's probabilities of ordered pairs, ``(B, T, T)``."""
        x, _ = self.entrance(x, 1, chance.generator)
        _, logits = self.layer.transform(x)
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        logits = logits.masked_fill(itself, -torch.inf)
        return logits.flatten(1).softmax(1).view_as(logits)


def others(places: Tensor, size: int) -> Tensor:
    """Return the indices below ``size`` that are not in ``places (B, R)``, in order."""
    used = torch.zeros(len(places), size, device=places.device, dtype=torch.uint8)
    used = used.scatter(1, places, 1)
    return used.argsort(dim=1, stable=True)[:, : size - places.shape[1]]
