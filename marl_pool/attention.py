"""Multi-head attention with padding, shared by the encoders and the pooling heads."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marl_pool.errors import InputError
from marl_pool.narrow_attention import WIDEST, narrow_attention

AttentionScale = Literal["model", "head"]
"""Divide scores by √dim, as the AdaPool paper does, or by √(dim / heads)."""


class MultiHeadAttention(nn.Module):
    """softmax(Q Kᵀ · scale) V, then an output projection.

    Source: Vaswani et al. (2017); the AdaPool paper, section 3.5 and B.2. That paper
    scales by the model width, which for several heads is a softer softmax than the
    usual head width; both are here.

    Args:
        dim: D, the width of queries, keys, values and output.
        num_heads: H, a divisor of ``dim``.
        scale: divide scores by √dim ("model") or √(dim / num_heads) ("head").
        bias: of the four projections.
        dropout: probability, while training, that an attention weight is dropped, and
            that a feature of the result is; in [0, 1).

    Raises:
        InputError: ``num_heads`` does not divide ``dim``, an unknown scale, or a
            dropout out of range.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        scale: AttentionScale = "model",
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise InputError(
                f"num_heads: expected a divisor of dim = {dim}, got {num_heads}"
            )
        if scale not in ("model", "head"):
            raise InputError(
                f"attention_scale: expected 'model' or 'head', got {scale!r}"
            )
        if not 0 <= dropout < 1:
            raise InputError(
                f"attention_dropout: expected a number in [0, 1), got {dropout}"
            )
        self.num_heads, self.dropout = num_heads, dropout
        self._narrow = dim // num_heads <= WIDEST
        self.scale = 1 / math.sqrt(dim if scale == "model" else dim // num_heads)
        self.to_query = nn.Linear(dim, dim, bias=bias)
        self.to_key = nn.Linear(dim, dim, bias=bias)
        self.to_value = nn.Linear(dim, dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self, query: Tensor, context: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        """Attend from ``query`` to ``context``.

        Args:
            query: ``(B, M, D)``.
            context: ``(B, N, D)``, finite also under padding.
            padding: ``(B, N)`` bool, True = ignore. A row that is all padding gives
                the output for a zero mixture.

        Returns:
            ``(B, M, D)``.
        """
        queries, keys, values = map(self._split, self._project(query, context))
        if self.training and self.dropout:
            mixed = self._attend(queries, keys, values, padding, self.dropout)
            return F.dropout(
                self.to_out(mixed.transpose(1, 2).flatten(2)), self.dropout
            )
        # Its gradient is a difference of means: bfloat16 has too few digits for it.
        precise = queries.dtype in (torch.float32, torch.float64)
        compiling = torch.compiler.is_compiling()
        if self._narrow and precise and query.is_cpu and not compiling:
            mixed = narrow_attention(queries, keys, values, padding, self.scale)
        else:
            mixed = self._attend(queries, keys, values, padding)
        return self.to_out(mixed.transpose(1, 2).flatten(2))

    def _project(self, query: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        parts = (self.to_query, self.to_key, self.to_value)
        if query is not context:
            return parts[0](query), parts[1](context), parts[2](context)
        # One product instead of three: narrow ones are bound by memory.
        weight = torch.cat([part.weight for part in parts])
        bias = None
        if self.to_query.bias is not None:
            bias = torch.cat([part.bias for part in parts])
        return F.linear(context, weight, bias).chunk(3, dim=-1)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        padding: Tensor | None,
        dropout: float = 0.0,
    ) -> Tensor:
        keep = None if padding is None else self._keep(padding)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=keep, dropout_p=dropout, scale=self.scale
        )
        if padding is None:
            return mixed
        # A row without any key is undefined in softmax; we define it as zero.
        return mixed.masked_fill(padding.all(-1)[:, None, None, None], 0.0)

    def logits(
        self, query: Tensor, context: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        """Return the softmax's arguments, ``(B, H, M, N)``; the lowest under padding.

        The lowest is finite, so that a row that is all padding has no NaN.
        """
        queries = self._split(self.to_query(query))
        keys = self._split(self.to_key(context))
        scores = queries @ keys.transpose(-1, -2) * self.scale
        if padding is None:
            return scores
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(padding[:, None, None, :], lowest)

    def weights(
        self, query: Tensor, context: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        """Return the softmax weights, ``(B, H, M, N)``; zero under padding."""
        weights = self.logits(query, context, padding).softmax(-1)
        if padding is None:
            return weights
        return weights.masked_fill(padding[:, None, None, :], 0.0)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    @staticmethod
    def _keep(padding: Tensor) -> Tensor:
        # torch's attention wants True = attend: turned round here and nowhere else.
        # Rows without a key keep them all, so that no NaN enters the gradient.
        keep = ~padding | padding.all(-1, keepdim=True)
        return keep[:, None, None, :]
