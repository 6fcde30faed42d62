"""Adaptive pooling (AdaPool): attention from one query to the set."""

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.attention import (
    AttentionScale,
    MultiHeadAttention,
    validate_heads,
)
from marl_pool.options.types import Extent, Probability, Repeats, SizeOrZero
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import SELF_TYPE, Mask, Types
from marl_pool.utils.errors import InputError, UnfitTokensError

Query = Literal["self", "mean", "learned"] | list[SizeOrZero]


class AdaPooling(Pooling):
    r"""Attention from one query: self, the mean, a learned one, or given positions.

    .. math::
        y = [x_q +]\; W_O\, \mathrm{concat}_h \sum_{i=1}^N w_i^h\, x_i W_V^h, \qquad
        w_i^h = \mathrm{softmax}_i\left(
            \frac{x_q W_Q^h\,(x_i W_K^h)^\top}{\sqrt{d}}\right)

    The query :math:`x_q` determines which tokens count as signal: unlike `AvgPooling`
    and `MaxPooling`, which are special cases, the head can ignore distractors however
    many there are. The query is added back where it is a single token.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set. ``query="self"`` needs
    ``types``; without them the default query is the mean.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    Definition 3.9 with equations 6 and 7, section 3.5 (residual) and B.2 (heads).
    Difference from the published code: the token of the controlled entity is found by
    its type, not at a fixed position, so a shuffle cannot lose it. If a perturbation
    removes it, the mean of the tokens present is the query.

    Example:
        >>> pool = AdaPooling(8, num_heads=2, query="mean")
        >>> x = torch.randn(4, 6, 8)
        >>> padding = torch.arange(6).expand(4, 6) >= 5
        >>> pool(x, padding).shape
        torch.Size([4, 8])
        >>> pool.weights(x, padding).shape  # each head's weights sum to 1
        torch.Size([4, 2, 6])

    Args:
        num_heads: number of heads, a divisor of D.
        query: ``"self"``, the mean of the tokens of type 0; ``"mean"`` of all tokens;
            a list of positions, whose mean is the query (one is the paper's *corner*,
            several are its *focal* query; not permutation invariant); ``"learned"``,
            a parameter. None means "self" where there is such a token and a call
            gives ``types``, else "mean".
        residual: add the query to the result. With None, as published, it is added if
            the query is one token ("self" or one position).
        attention_scale: divide scores by the square root of the model width, as
            published, or of the head width.
        has_self: True if the tokens include the observer's own.
        attention_dropout: probability, while training, that an attention weight is
            dropped, and that a feature of the attention's result is; in [0, 1).

    Raises:
        UnfitTokensError: when called with too few tokens for a query position.
    """

    def __init__(
        self,
        dim: Extent,
        *,
        num_heads: Repeats = 1,
        query: Query | None = None,
        residual: bool | None = None,
        attention_scale: AttentionScale = "model",
        has_self: bool = True,
        attention_dropout: Probability = 0.0,
    ) -> None:
        super().__init__(dim)
        validate_heads("pooling.num_heads", num_heads, dim)
        # Called with vectors alone, without types, the default query is their mean.
        self.mean_without_types = query is None
        self.added_without_types = residual is True
        if query is None:
            query = "self" if has_self else "mean"
        self.query: Query = query if isinstance(query, str) else list(query)
        if self.query == "self" and not has_self:
            raise InputError(
                "pooling.query: these tokens include no self token; "
                "choose mean, learned or a list of positions"
            )
        if not self.query:
            raise InputError(
                "pooling.query: expected self, mean, learned or a list of positions "
                ">= 0, got []"
            )
        # A residual connection makes sense if the query is a token.
        is_token = self.query == "self" or len(self.query) == 1
        self.residual = is_token if residual is None else residual
        self.permutation_invariant = isinstance(self.query, str)
        self.attention = MultiHeadAttention(
            dim, num_heads, scale=attention_scale, dropout=attention_dropout
        )
        if self.query == "learned":
            self.learned_query = nn.Parameter(torch.randn(dim))

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        query = self._query(x, padding, types)
        pooled = self.attention(query[:, None], x, padding)[:, 0]
        mean = types is None and self.mean_without_types
        if self.added_without_types if mean else self.residual:
            pooled = pooled + query
        if padding is not None:
            pooled = pooled.masked_fill(padding.all(1, keepdim=True), 0.0)
        return pooled

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, types = self.prepare(x, padding, types)
        query = self._query(x, padding, types)
        return self.attention.weights(query[:, None], x, padding)[:, :, 0]

    @override
    def logits(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # The relations r_i of the paper's section 3.5.
        x, padding, types = self.prepare(x, padding, types)
        query = self._query(x, padding, types)
        return self.attention.logits(query[:, None], x, padding)[:, :, 0]

    def _query(self, x: Tensor, padding: Mask, types: Types) -> Tensor:
        if self.query == "learned":
            return self.learned_query.expand(x.shape[0], -1)
        if padding is None:
            present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        else:
            present = ~padding
        if isinstance(self.query, list):
            if max(self.query) >= x.shape[1]:
                raise UnfitTokensError(
                    f"AdaPool: query positions {self.query} need more than the "
                    f"{x.shape[1]} tokens given"
                )
            return _mean(x[:, self.query], present[:, self.query])
        if self.query == "mean" or (types is None and self.mean_without_types):
            return _mean(x, present)
        if types is None:
            raise InputError(
                "AdaPooling: types: expected the tokens' types for query='self', got "
                "None; query='mean' needs none"
            )
        # Without a self token, all tokens present take its place.
        self_tokens = present & (types == SELF_TYPE)
        return _mean(x, self_tokens | (present & ~self_tokens.any(1, keepdim=True)))


def _mean(x: Tensor, included: Tensor) -> Tensor:
    """Return the mean of the included vectors, zero where there are none."""
    mask = included.to(x.dtype)
    return (mask[:, None] @ x)[:, 0] / mask.sum(1, keepdim=True).clamp(min=1)
