"""Pooling by multi-head attention: learned seeds that look at the set."""

import torch
from torch import Tensor, nn

from marl_pool.encoders.set_transformer import AttentionBlock
from marl_pool.kernels.attention import AttentionScale
from marl_pool.pooling.base import Pooling
from marl_pool.utils.types import PositiveInt


class PMAPooling(Pooling):
    """Attention from k learned seeds to the set, their results side by side.

    ``PMA_k(X) = MAB(S, rFF(X))`` with ``MAB(S, Z) = LN(H + rFF(H))`` and
    ``H = LN(S + Attention(S, Z, Z))``.

    Source: Lee et al. (2019), *Set Transformer*, equations 6, 7 and 13. As there,
    attention scores are divided by the square root of the model's width. Where we
    differ: an empty set gives zero.

    Args:
        dim: D, the width of the vectors.
        num_seeds: k; the result is k times as wide as a vector.
        num_heads: a divisor of ``dim``.
        layer_norm: normalise as above; the authors' code leaves it away by default.
        attention_scale: divide scores by the square root of the model or head width.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_seeds: PositiveInt = 1,
        num_heads: PositiveInt = 1,
        layer_norm: bool = True,
        attention_scale: AttentionScale = "model",
    ) -> None:
        super().__init__(dim, dim_out=num_seeds * dim)
        self.learned_query = nn.Parameter(torch.randn(num_seeds, dim))
        self.before = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.block = AttentionBlock(dim, num_heads, layer_norm, attention_scale)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, k D)``; see `Pooling.forward`."""
        seeds = self.learned_query.to(x.dtype).expand(x.shape[0], -1, -1)
        pooled = self.block(seeds, self.before(x), padding).flatten(1)
        if padding is None:
            return pooled
        return pooled.masked_fill(padding.all(1, keepdim=True), 0.0)

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights, the mean over seeds, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        seeds = self.learned_query.to(x.dtype).expand(x.shape[0], -1, -1)
        attention = self.block.attention
        return attention.weights(seeds, self.before(x), padding).mean(2)
