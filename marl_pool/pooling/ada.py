"""Adaptive pooling: attention from one query to the set."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from marl_pool.kernels.attention import AttentionScale, MultiHeadAttention
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import SELF_TYPE
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.types import PositiveInt, Probability

Query = Literal["self", "mean", "learned"] | list[int]


class AdaPooling(Pooling):
    """Cross-attention with a single query; a query that is a token is added back.

    ``y = [q +] W_O Σ_i softmax_i(q W_Q · x_i W_K / √d) x_i W_V`` with several heads.

    Source: the AdaPool paper, Definition 3.9, section 3.5 (residual) and B.2 (heads).
    The published code adds the residual only where the query is a single token.
    Where we differ: the paper's query for entities is "the token of the controlled
    entity" at a fixed position; ours is found by its type, so a shuffle cannot lose
    it. If it is lost at run time, the mean of the tokens present takes its place. For
    an empty set the result is zero.

    Args:
        dim: D, the width of the vectors.
        num_heads: a divisor of ``dim``.
        query: ``"self"``, the mean of the unpadded tokens of type 0; ``"mean"``, the
            mean of all tokens present; a list of positions, whose mean is taken (one
            is the paper's *corner*, several its *focal* query; not permutation
            invariant); ``"learned"``, a parameter. None means "self" where there is
            such a token, else "mean".
        residual: add the query to the result; None means as in the published code:
            for a query that is one token ("self", one position), not for a mean
            (several positions, "mean") nor for a learned query.
        attention_scale: divide scores by the square root of the model or head width.
        has_self: whether the tokens include the observer's own.
        attention_dropout: see `MultiHeadAttention`; the query that is added is kept.

    Raises:
        InputError: "self" is asked for without such a token; an unknown query; a
            position that is negative or not among the N tokens.
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
        self.query = _check_query(query, has_self)
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

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        query = self._query(x, padding, types)
        pooled = self.attention(query[:, None], x, padding)[:, 0]
        if self.residual:
            pooled = pooled + query
        if padding is not None:
            pooled = pooled.masked_fill(padding.all(1, keepdim=True), 0.0)
        return pooled

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights, ``(B, heads, N)``."""
        x, padding, types = self.prepare(x, padding, types)
        query = self._query(x, padding, types)
        return self.attention.weights(query[:, None], x, padding)[:, :, 0]

    def logits(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the relation scores, ``(B, heads, N)``; see `Pooling.logits`.

        Source: the AdaPool paper, section 3.5: x_q W_Q W_Kᵀ x_iᵀ / √d.
        """
        x, padding, types = self.prepare(x, padding, types)
        query = self._query(x, padding, types)
        return self.attention.logits(query[:, None], x, padding)[:, :, 0]

    def _query(self, x: Tensor, padding: Tensor | None, types: Tensor | None) -> Tensor:
        if self.query == "learned":
            return self.learned_query.expand(x.shape[0], -1)
        if isinstance(self.query, list):
            return self._at_positions(x, padding, self.query)
        if self.query == "mean":
            return _mean(x, _present(x, padding))
        if types is None:
            raise InputError("AdaPool: query 'self' needs types; got None")
        present = _present(x, padding)
        own = present & (types == SELF_TYPE)
        return _mean(x, torch.where(own.any(1, keepdim=True), own, present))

    @staticmethod
    def _at_positions(
        x: Tensor, padding: Tensor | None, positions: list[int]
    ) -> Tensor:
        if max(positions) >= x.shape[1]:
            raise UnfitTokensError(
                f"AdaPool: query positions {positions} need more than the "
                f"{x.shape[1]} tokens given"
            )
        chosen = x[:, positions]
        return _mean(chosen, _present(chosen, padding, positions))


def _check_query(query: Query | None, has_self: bool) -> Query:
    if query is None:
        return "self" if has_self else "mean"
    if query == "self" and not has_self:
        raise InputError(
            "pooling.query: these tokens include no self token; "
            "choose mean, learned or a list of positions"
        )
    if query in ("self", "mean", "learned"):
        return query
    # A list from a configuration may be of another class, but each entry is an int.
    positions: list[Any] = list(query) if isinstance(query, Sequence) else []
    if not positions or not all(type(i) is int and i >= 0 for i in positions):
        raise InputError(
            "pooling.query: expected self, mean, learned or a list of positions "
            f">= 0, got {query!r}"
        )
    return positions


def _present(
    x: Tensor, padding: Tensor | None, positions: list[int] | None = None
) -> Tensor:
    if padding is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return ~(padding if positions is None else padding[:, positions])


def _mean(x: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen vectors; zero where none is."""
    share = chosen.to(x.dtype)
    return (share[:, None] @ x)[:, 0] / share.sum(1, keepdim=True).clamp(min=1)
