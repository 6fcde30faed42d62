"""Pooling by multi-head attention (PMA), from learned seeds to the set."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.transformer import AttentionBlock
from marl_pool.kernels.attention import AttentionScale, validate_heads
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import PositiveInt


class PMAPooling(Pooling):
    r"""Attention from k learned seeds to the set, their results concatenated.

    .. math::
        \mathrm{PMA}_k(X) = \mathrm{MAB}(S, \mathrm{rFF}(X)), \qquad
        \mathrm{MAB}(S, Z) = \mathrm{LN}(H + \mathrm{rFF}(H)), \qquad
        H = \mathrm{LN}(S + \mathrm{Attention}(S, Z, Z))

    S holds the seeds, ``(k, D)``; rFF is a linear layer with ReLU on each vector. The
    seeds do not depend on the set, unlike the query of `AdaPooling`.

    Shapes: ``(B, N, D)`` to ``(B, k D)``; zero for an empty set.

    Source: Lee et al. (2019), *Set Transformer*, https://arxiv.org/abs/1810.00825,
    equations 6, 7 and 13. The published code has no LayerNorm by default.

    Example:
        >>> pool = PMAPooling(8, num_seeds=2, num_heads=4)
        >>> x = torch.randn(3, 10, 8)
        >>> pool(x).shape
        torch.Size([3, 16])
        >>> pool.weights(x).shape
        torch.Size([3, 4, 10])

    Args:
        num_seeds: k, the number of seeds.
        num_heads: number of heads, a divisor of D.
        layer_norm: normalize as above.
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
        super().__init__(dim)
        validate_heads("pooling.num_heads", num_heads, dim)
        self.dim_out = num_seeds * dim
        self.learned_query = nn.Parameter(torch.randn(num_seeds, dim))
        self.feedforward = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.block = AttentionBlock(dim, num_heads, layer_norm, attention_scale)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        pooled = self.block(self._seeds(x), self.feedforward(x), padding).flatten(1)
        if padding is not None:
            pooled = pooled.masked_fill(padding.all(1, keepdim=True), 0.0)
        return pooled

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        """Return the attention weights, their mean over seeds, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        attention = self.block.attention
        return attention.weights(self._seeds(x), self.feedforward(x), padding).mean(2)

    def _seeds(self, x: Tensor) -> Tensor:
        return self.learned_query.to(x.dtype).expand(x.shape[0], -1, -1)
