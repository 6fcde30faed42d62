"""Adaptive pooling (AdaPool): attention from one query to the set."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.attention import AttentionScale, MultiHeadAttention
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import SELF_TYPE, Mask, Types
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.types import PositiveInt, Probability

Query = Literal["self", "mean", "learned"] | list[int]


class AdaPooling(Pooling):
    r"""Cross-attention from a single query to the set.

    .. math::
        y = [x_q +]\; W_O\, \mathrm{concat}_h \sum_{i=1}^N w_i^h\, x_i W_V^h, \qquad
        w_i^h = \mathrm{softmax}_i\left(
            \frac{x_q W_Q^h\,(x_i W_K^h)^\top}{\sqrt{d}}\right)

    The query :math:`x_q` determines which tokens count as signal: unlike `AvgPooling`
    and `MaxPooling`, which are special cases, the head can ignore distractors however
    many there are. The query is added back where it is a single token.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set. ``query="self"`` needs
    ``types``.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    Definition 3.9 with equations 6 and 7, section 3.5 (residual) and B.2 (heads).
    Difference from the published code: the paper's query is "the token of the
    controlled entity" at a fixed position; here it is found by its type, so a shuffle
    cannot lose it. If a perturbation removes it, the mean of the tokens present is the
    query.

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
        query: ``"self"``, the mean of the unpadded tokens of type 0; ``"mean"``, the
            mean of all tokens present; a list of positions, whose mean is the query
            (one position is the paper's *corner*, several are its *focal* query; not
            permutation invariant); ``"learned"``, a parameter. None means "self" where
            there is such a token, else "mean".
        residual: add the query to the result; None means as in the published code:
            for a query that is one token ("self" or one position), but not for a mean
            or a learned query.
        attention_scale: divide scores by the square root of the model width, as
            published, or of the head width.
        has_self: True if the tokens include the observer's own.
        attention_dropout: probability, while training, that an attention weight is
            dropped, and that a feature of the attention's result is; in [0, 1).

    Raises:
        InputError: query "self" without such a token or without types; an unknown
            query; a negative position.
        UnfitTokensError: from `forward`, a position beyond the tokens given.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: PositiveInt = 1,
        query: Query | None = None,
        residual: bool | None = None,
        attention_scale: AttentionScale = "model",
        has_self: bool = True,
        attention_dropout: Probability = 0.0,
    ) -> None:
        super().__init__(dim)
        self.query = _resolve_query(query, has_self)
        is_token = self.query == "self" or (
            isinstance(self.query, list) and len(self.query) == 1
        )
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
        if self.residual:
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
        """Return the relations r_i of the paper's section 3.5, ``(B, heads, N)``."""
        x, padding, types = self.prepare(x, padding, types)
        query = self._query(x, padding, types)
        return self.attention.logits(query[:, None], x, padding)[:, :, 0]

    def _query(self, x: Tensor, padding: Mask, types: Types) -> Tensor:
        if self.query == "learned":
            return self.learned_query.expand(x.shape[0], -1)
        if isinstance(self.query, list):
            return self._at_positions(x, padding, self.query)
        if self.query == "mean":
            return _mean(x, _present(x, padding))
        if types is None:
            raise InputError("AdaPool: query 'self' needs types; got None")
        # Where no self token is left, all tokens present take its place.
        present = _present(x, padding)
        own = present & (types == SELF_TYPE)
        return _mean(x, torch.where(own.any(1, keepdim=True), own, present))

    @staticmethod
    def _at_positions(x: Tensor, padding: Mask, positions: list[int]) -> Tensor:
        if max(positions) >= x.shape[1]:
            raise UnfitTokensError(
                f"AdaPool: query positions {positions} need more than the "
                f"{x.shape[1]} tokens given"
            )
        chosen = x[:, positions]
        return _mean(chosen, _present(chosen, padding, positions))


def _resolve_query(query: Query | None, has_self: bool) -> Query:
    if query is None:
        return "self" if has_self else "mean"
    if query == "self" and not has_self:
        raise InputError(
            "pooling.query: these tokens include no self token; "
            "choose mean, learned or a list of positions"
        )
    if query in ("self", "mean", "learned"):
        return query
    # Lists from Hydra are not of class list, but their entries are of class int.
    positions: list[Any] = list(query) if isinstance(query, Sequence) else []
    if not positions or not all(type(i) is int and i >= 0 for i in positions):
        raise InputError(
            "pooling.query: expected self, mean, learned or a list of positions "
            f">= 0, got {query!r}"
        )
    return positions


def _present(x: Tensor, padding: Mask, positions: list[int] | None = None) -> Tensor:
    if padding is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return ~(padding if positions is None else padding[:, positions])


def _mean(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen vectors, zero where none is."""
    mask = chosen.to(x.dtype)
    return (mask[:, None] @ x)[:, 0] / mask.sum(1, keepdim=True).clamp(min=1)
