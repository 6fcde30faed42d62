"""Multi-head attention with padding, for encoders and pooling heads."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marl_pool.kernels.functional import (
    input_gradients,
    is_transformed,
    plain_attention,
    plain_gradients,
    split_heads,
)
from marl_pool.kernels.narrow_attention import WIDEST, narrow_attention
from marl_pool.utils.errors import InputError

AttentionScale = Literal["model", "head"]
"""Divide scores by √dim, as the AdaPool paper does, or by √(dim / heads)."""


def validate_heads(key: str, num_heads: int, dim: int) -> None:
    """Raise `InputError` unless ``num_heads``, the option ``key``, divides ``dim``."""
    if num_heads < 1 or dim % num_heads:
        raise InputError(f"{key}: expected a divisor of dim = {dim}, got {num_heads}")


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention.

    .. math::
        \mathrm{concat}_h\left(\mathrm{softmax}\left(
            s\, Q_h K_h^\top\right) V_h\right) W_O

    with :math:`Q = q W_Q`, :math:`K = x W_K` and :math:`V = x W_V` split into H heads.

    On a CPU, narrow heads use `narrow_attention`, all others torch's fused kernels; in
    function transforms, `plain_attention`.

    Shapes: queries ``(B, M, D)`` and context ``(B, N, D)`` to ``(B, M, D)``.

    Source: Vaswani et al. (2017), https://arxiv.org/abs/1706.03762; the AdaPool paper
    (Brothers, 2025, https://arxiv.org/abs/2506.09215), section 3.5 and B.2, which
    scales by the model width. For several heads this gives a softer softmax than the
    usual scale by the head width.

    Args:
        dim: D, the width of queries, keys, values and result.
        num_heads: H, the number of heads, a divisor of D.
        scale: s, 1/√D ("model") or 1/√(D / H) ("head").
        bias: give the four projections a bias.
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
        validate_heads("num_heads", num_heads, dim)
        if scale not in ("model", "head"):
            raise InputError(
                f"attention_scale: expected 'model' or 'head', got {scale!r}"
            )
        if not 0 <= dropout < 1:
            raise InputError(
                f"attention_dropout: expected a number in [0, 1), got {dropout}"
            )
        self.num_heads, self.dropout = num_heads, dropout
        # Narrow heads have a separate kernel.
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
            context: ``(B, N, D)``, finite even under padding.
            padding: ``(B, N)`` bool, True = ignore. An empty set gives the output
                projection of zero.

        Returns:
            ``(B, M, D)``.
        """
        parts = self._project(query, context)
        queries, keys, values = (split_heads(part, self.num_heads) for part in parts)
        # The gradient of narrow attention is a difference of means, for which bfloat16
        # has too few digits.
        precise = queries.dtype in (torch.float32, torch.float64)
        # Choose the fastest kernel that this context supports.
        attend: Callable[..., Tensor] = fused_attention
        dropout = self.dropout if self.training else 0.0
        if dropout:
            attend = partial(_scaled_dot_product, dropout=dropout)
        elif torch.compiler.is_compiling():
            attend = _scaled_dot_product  # fused by the compiler
        elif is_transformed():
            attend = plain_attention
        elif self._narrow and precise and query.is_cpu:
            attend = narrow_attention
        mixed = attend(queries, keys, values, padding, self.scale)
        result = self.to_out(mixed.transpose(1, 2).flatten(2))
        return F.dropout(result, dropout) if dropout else result

    def _project(self, query: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        parts = (self.to_query, self.to_key, self.to_value)
        if query is not context:
            return parts[0](query), parts[1](context), parts[2](context)
        # Self-attention: one product instead of three, since they are memory-bound.
        weight = torch.cat([part.weight for part in parts])
        bias = None
        if self.to_query.bias is not None:
            bias = torch.cat([part.bias for part in parts])
        return F.linear(context, weight, bias).chunk(3, dim=-1)

    def logits(
        self, query: Tensor, context: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        """Return the scores, ``(B, H, M, N)``; the lowest number under padding.

        It is finite, so that the softmax over an empty set is not NaN.
        """
        queries = split_heads(self.to_query(query), self.num_heads)
        keys = split_heads(self.to_key(context), self.num_heads)
        scores = queries @ keys.transpose(-1, -2) * self.scale
        if padding is None:
            return scores
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(padding[:, None, None, :], lowest)

    def weights(
        self, query: Tensor, context: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights, ``(B, H, M, N)``; zero under padding."""
        weights = self.logits(query, context, padding).softmax(-1)
        if padding is None:
            return weights
        return weights.masked_fill(padding[:, None, None, :], 0.0)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scale: float
) -> Tensor:
    """Return ``softmax(scale · q kᵀ) v`` by torch's fused kernels.

    As these have no second derivative, second-order gradients are computed by
    `plain_attention`. The arguments are the same.
    """
    tensors = (query, key, value)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _FusedAttention.apply(*tensors, padding, scale)
    return _scaled_dot_product(*tensors, padding, scale)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, padding, scale = arguments
        ctx.save_for_backward(*inputs, padding)
        ctx.scale = scale
        ctx.inner = _with_graph(inputs, ctx.needs_input_grad, padding, scale)
        return ctx.inner[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, padding = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *plain_gradients(inputs, padding, ctx.scale, gradient), None, None
        # Release the inner graph, so that its memory is freed as early as an ordinary
        # node's. A second pass through a retained graph builds it again.
        inner, ctx.inner = ctx.inner, None
        if inner is None:
            inner = _with_graph(inputs, ctx.needs_input_grad, padding, ctx.scale)
        parts, result = inner
        return *input_gradients(result, parts, gradient), None, None


def _with_graph(
    inputs: Sequence[Tensor],
    needs_gradient: Sequence[bool],
    padding: Tensor | None,
    scale: float,
) -> tuple[list[Tensor], Tensor]:
    """Return detached inputs and the fused result, with a graph between the two."""
    with torch.enable_grad():
        parts = [
            part.detach().requires_grad_(needed)
            for part, needed in zip(inputs, needs_gradient, strict=False)
        ]
        return parts, _scaled_dot_product(parts[0], parts[1], parts[2], padding, scale)


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    keep = empty = None
    if padding is not None:
        # In torch's attention True means attend. The mask is inverted here and nowhere
        # else. An empty set keeps all its keys, so that its gradient is not NaN.
        # (torch's CPU kernels return zeros for such rows since 2.5; CUDA's are not
        # tested here.)
        empty = padding.all(-1)[:, None, None, None]
        keep = ~padding[:, None, None] | empty
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=keep, dropout_p=dropout, scale=scale
    )
    # A softmax over no keys is undefined; here its result is zero.
    return mixed if empty is None else mixed.masked_fill(empty, 0.0)
