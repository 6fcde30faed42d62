"""Encoder: one merging layer, applied until few tokens are left.

It is not a `marl_pool.encoders.base.Encoder`, which keeps the number of tokens.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

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
        pairs: merged pairs of an encoder's layer.
    """

    tokens: Tensor
    rest: Tensor
    log_prob: Tensor
    norm: Tensor
    pairs: Pairs | None = None


class NetworkOutput(NamedTuple):
    """Output of a stack of layers, or of a network with such stacks.

    Attributes:
        output: tokens ``(B, S, D)``, images ``(B, H, W, C)`` or logits ``(B, K)``.
        log_prob: ``(B,)``, log-probability of all choices.
        norm: ``(B,)``, squared norm of the tokens, summed over layers.
    """

    output: Tensor
    log_prob: Tensor
    norm: Tensor


class Entrance(nn.Module):
    """Input transformation of a layer: add the encoding of its depth, and noise.

    ``noise`` is the standard deviation of Gaussian noise, in training only.

    Source: Nair and Lieck, section 3.1.2, equations 5 to 7.
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


class LayerStack(nn.Module):
    """Base of encoder and decoder: layers that share their weights."""

    def __init__(self, settings: Hierarchy) -> None:
        super().__init__()
        self.settings = settings
        self.entrance = Entrance(settings.dim, settings.token_noise)

    @abstractmethod
    def step(self, x: Tensor, depth: int, count: int, chance: Chance) -> LayerOutput:
        """Apply one layer.

        Args:
            x: ``(B, T, D)``, tokens without padding.
            depth: depth of the encoder's layer, from 1, also in the decoder.
            count: R, pairs to merge or tokens to unmerge.
            chance: source and mode of the choices.
        """

    def apply_layers(
        self, x: Tensor, layers: Iterable[tuple[int, int]], chance: Chance
    ) -> NetworkOutput:
        """Apply layers, given as depth and count, one after the other."""
        log_prob = norm = torch.zeros(len(x), device=x.device)
        for depth, count in layers:
            step = self.step(x, depth, count, chance)
            x = step.tokens
            log_prob, norm = log_prob + step.log_prob, norm + step.norm
        return NetworkOutput(x, log_prob, norm)

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

    def forward(
        self, x: Tensor, schedule: Sequence[int], chance: Chance
    ) -> NetworkOutput:
        """Merge ``x (B, T, D)``; ``schedule`` has the number of pairs of each layer."""
        return self.apply_layers(x, enumerate(schedule, 1), chance)

    @override
    def step(self, x: Tensor, depth: int, count: int, chance: Chance) -> LayerOutput:
        # Score all pairs, and choose some; Gumbel noise samples from the softmax.
        x, norm = self.entrance(x, depth, chance.generator)
        x, logits = self.layer.transform(x)
        scores = logits.detach()
        if chance.explore or self.settings.policy == "random":
            scores = scores + gumbel(scores, chance.generator)
        # Merge the pairs, and take the log-probability of each choice.
        pairs = choose_pairs(scores, count)
        log_probs = pair_log_prob(logits, pairs, masked=self.settings.is_masked)
        merged, log_probs = self.scaled(self.layer.merged(x, pairs), log_probs)
        # Append the merged tokens to the unchanged ones, then refine all.
        rest = others(torch.cat(pairs[:2], 1), x.shape[1])
        new = torch.cat([gather_tokens(x, rest), merged], 1)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x)
        return LayerOutput(new, rest, log_probs.sum(1), norm, pairs)

    @torch.no_grad()
    def first_policy(self, x: Tensor, chance: Chance) -> Tensor:
        """Compute the first merge's probabilities of ordered pairs, ``(B, T, T)``."""
        # Apply the first layer up to its choice of pairs.
        x, _ = self.entrance(x, 1, chance.generator)
        _, logits = self.layer.transform(x)
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        logits = logits.masked_fill(itself, -torch.inf)
        return logits.flatten(1).softmax(1).view_as(logits)


def others(places: Tensor, size: int) -> Tensor:
    """Return the indices below ``size`` that are not in ``places (B, R)``, in order."""
    # A stable sort puts unused indices first, in order.
    used = torch.zeros(len(places), size, device=places.device, dtype=torch.uint8)
    used = used.scatter(1, places, 1)
    return used.argsort(dim=1, stable=True)[:, : size - places.shape[1]]
