"""Decoder: unmerge tokens, layer by layer, until their number is restored."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.merging import Refinement, merging_mlp
from marl_pool.encoders.pairs import (
    choose_tokens,
    gather_tokens,
    gumbel,
    token_log_prob,
)
from marl_pool.encoders.transformer import TransformerLayer
from marl_pool.studies.hierarchical.encoder import (
    Chance,
    LayerOutput,
    LayerStack,
    NetworkOutput,
    others,
)
from marl_pool.studies.hierarchical.settings import Hierarchy


class HierarchicalDecoder(LayerStack):
    """Unmerge, refine, transformer block: the same weights in each layer.

    The tokens to unmerge are sampled without replacement from the softmax of their
    scores; if all are unmerged, the log-probability is 0. A layer receives the encoding
    of the depth of the encoder's layer that it reverses. ``settings.policy`` has no
    effect here.

    Source: Nair and Lieck, section 3.1.3. Difference: scores are of layer-normalised
    tokens.
    """

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

    def forward(
        self, x: Tensor, schedule: Sequence[int], chance: Chance
    ) -> NetworkOutput:
        """Reverse a schedule of `HierarchicalEncoder.forward`."""
        layers = list(enumerate(schedule, 1))
        return self.apply_layers(x, reversed(layers), chance)

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
        forcing, ``log_prob`` is the mean of those of choosing each.
        """
        # Choose the tokens to unmerge.
        x, norm = self.entrance(x, depth, chance.generator)
        logits = self._logits(x)
        chosen = self._choose(logits, count, chance) if forced is None else forced
        log_probs = token_log_prob(logits, chosen, masked=self.settings.is_masked)
        # If all tokens are chosen, there is no choice to credit.
        if count == x.shape[1]:
            log_probs = torch.zeros_like(log_probs)
        # Split each chosen token in two.
        halves = self.unmerge(gather_tokens(x, chosen))
        halves, log_probs = self.scaled(halves, log_probs)
        log_prob = log_probs.sum(1)
        # Teacher forcing trains the choice itself, by its mean log-likelihood.
        if forced is not None:
            log_prob = token_log_prob(logits, forced, masked=False).sum(1)
            log_prob = log_prob / max(count, 1)
        # Append the new tokens to the unchanged ones, then refine all.
        rest = others(chosen, x.shape[1])
        new = torch.cat([gather_tokens(x, rest), *halves.chunk(2, -1)], 1)
        if self.refine is not None and self.block is not None:
            new = self.block(self.refine(new, x))
        return LayerOutput(new, rest, log_prob, norm)

    @staticmethod
    def _choose(logits: Tensor, count: int, chance: Chance) -> Tensor:
        scores = logits.detach()
        if chance.explore:
            scores = scores + gumbel(scores, chance.generator)
        return choose_tokens(scores, count)

    def _logits(self, x: Tensor) -> Tensor:
        if not (self.settings.through_tokens or self.settings.is_scaled):
            x = x.detach()
        logits = self.score(self.score_norm(x))[..., 0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
