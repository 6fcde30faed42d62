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


class NetworkOutput(NamedTuple):
    """Output of a layer, of a stack of layers, or of a network with such stacks.

    Attributes:
        output: tokens ``(B, S, D)``, images ``(B, H, W, C)`` or logits ``(B, K)``.
        log_prob: ``(B,)``, log-probability of all choices.
    """

    output: Tensor
    log_prob: Tensor


class LayerStack(nn.Module):
    """Base of encoder and decoder: layers that share their weights."""

    def __init__(self, settings: Hierarchy) -> None:
        super().__init__()
        self.settings = settings

    @abstractmethod
    def step(self, x: Tensor, count: int, chance: Chance) -> NetworkOutput:
        """Apply one layer; the new tokens are last.

        Args:
            x: ``(B, T, D)``, tokens without padding, with the encoding of the depth.
            count: R, pairs to merge or tokens to unmerge.
            chance: source and mode of the choices.
        """

    def apply_layers(
        self, x: Tensor, layers: Iterable[tuple[int, int]], chance: Chance
    ) -> NetworkOutput:
        """Apply layers one after the other.

        Args:
            x: ``(B, T, D)``, tokens without padding.
            layers: depth of the encoder's layer, from 1, also in the decoder, and the
                number of pairs to merge or tokens to unmerge.
            chance: source and mode of the choices.
        """
        log_prob = torch.zeros(len(x), device=x.device)
        for depth, count in layers:
            # Source: Nair and Lieck, section 3.1.2, equation 7.
            x = x + timestep_encoding(depth, self.settings.dim).to(x)
            x, of_layer = self.step(x, count, chance)
            log_prob = log_prob + of_layer
        return NetworkOutput(x, log_prob)


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
            through_tokens=settings.through_tokens,
        )

    def forward(
        self, x: Tensor, schedule: Sequence[int], chance: Chance
    ) -> NetworkOutput:
        """Merge ``x (B, T, D)``; ``schedule`` has the number of pairs of each layer."""
        return self.apply_layers(x, enumerate(schedule, 1), chance)

    @override
    def step(self, x: Tensor, count: int, chance: Chance) -> NetworkOutput:
        # Score all pairs, and choose some; Gumbel noise samples from the softmax.
        x, logits = self.layer.transform(x)
        scores = logits.detach()
        if chance.explore or self.settings.policy == "random":
            scores = scores + gumbel(scores, chance.generator)
        # Merge the pairs, and take the log-probability of each choice.
        pairs = choose_pairs(scores, count)
        log_probs = pair_log_prob(logits, pairs, masked=self.settings.is_masked)
        # Append the merged tokens to the unchanged ones, then refine all.
        rest = others(torch.cat(pairs[:2], 1), x.shape[1])
        new = torch.cat([gather_tokens(x, rest), self.layer.merged(x, pairs)], 1)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x)
        return NetworkOutput(new, log_probs.sum(1))

    @torch.no_grad()
    def first_policy(self, x: Tensor) -> Tensor:
        """Compute the first merge's probabilities of ordered pairs, ``(B, T, T)``."""
        # Apply the first layer up to its choice of pairs.
        _, logits = self.layer.transform(x + timestep_encoding(1, x.shape[-1]).to(x))
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        logits = logits.masked_fill(itself, -torch.inf)
        return logits.flatten(1).softmax(1).view_as(logits)


def others(places: Tensor, size: int) -> Tensor:
    """Return the indices below ``size`` that are not in ``places (B, R)``, in order."""
    # A stable sort puts unused indices first, in order.
    used = torch.zeros(len(places), size, device=places.device, dtype=torch.uint8)
    used = used.scatter(1, places, 1)
    return used.argsort(dim=1, stable=True)[:, : size - places.shape[1]]
