"""Learned aggregation: attention across features, over a fixed number of vectors."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.pooling.base import SlotPooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import PositiveInt


class LearnedAggregationPooling(SlotPooling):
    r"""Attention over the D features, with learned weights for each slot of the set.

    .. math::
        y = \mathrm{softmax}\left(\frac{q W_Q\,(X^\top W_K)}{\sqrt{D}}\right)
            (X^\top W_V)

    :math:`X^\top` is ``(D, N)``, :math:`W_K` is ``(N, D)`` and :math:`W_V` is
    ``(N, P)``: unlike usual attention, the set is transposed. The softmax runs over
    features, and a vector contributes through the row of :math:`W_K` and :math:`W_V`
    that belongs to its slot. So the head depends on the order and on a fixed N, as
    `FlattenPooling` does, with N (D + P) weights instead of N D P.

    Shapes: ``(B, N, D)`` to ``(B, P)``; see `SlotPooling` for smaller sets.

    Source: the blog post *Learned Aggregation*. It divides by √d_k without defining
    d_k; here it is D, the size that the softmax runs over. Difference from the post's
    code: a batch of one keeps its batch dimension.

    Args:
        num_tokens: N, the largest number of slots.
        query_dim: width of the learned query q; None means D.
        dim_out: P, the width of the result; None means D.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_tokens: PositiveInt,
        query_dim: PositiveInt | None = None,
        dim_out: PositiveInt | None = None,
    ) -> None:
        super().__init__(dim, num_tokens)
        self.dim_out = dim_out or dim
        self.learned_query = nn.Parameter(torch.randn(query_dim or dim))
        self.to_query = nn.Linear(query_dim or dim, dim, bias=False)
        self.to_key = nn.Linear(num_tokens, dim, bias=False)
        self.to_value = nn.Linear(num_tokens, self.dim_out, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # Missing slots would be zero, so their columns of the weights are left out.
        count, features = x.shape[1], x.transpose(1, 2)
        keys = features @ self.to_key.weight[:, :count].T
        values = features @ self.to_value.weight[:, :count].T
        query = self.to_query(self.learned_query.to(x.dtype))
        scores = query @ keys / self.dim**0.5
        return (scores.softmax(-1)[:, None] @ values)[:, 0]
