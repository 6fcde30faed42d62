"""Multi-head attention with padding, shared by the encoders and the pooling heads."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marl_pool.kernels.narrow_attention import WIDEST, narrow_attention
from marl_pool.kernels.plain_attention import plain_attention, plain_gradients
from marl_pool.kernels.transforms import is_transformed
from marl_pool.utils.errors import InputError

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
            mixed = _scaled_dot_product(
                queries, keys, values, padding, self.scale, self.dropout
            )
            return F.dropout(
                self.to_out(mixed.transpose(1, 2).flatten(2)), self.dropout
            )
        # Its gradient is a difference of means: bfloat16 has too few digits for it.
        precise = queries.dtype in (torch.float32, torch.float64)
        attend = fused_attention
        if torch.compiler.is_compiling():
            attend = _scaled_dot_product  # the compiler knows it best
        elif is_transformed():
            attend = plain_attention
        elif self._narrow and precise and query.is_cpu:
            attend = narrow_attention
        mixed = attend(queries, keys, values, padding, self.scale)
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


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scale: float
) -> Tensor:
    """Return ``softmax(scale · q kᵀ) v`` by torch's fused kernels.

    Those have no second derivative of their own: a gradient of the gradient is that of
    `plain_attention`, which explains the arguments.
    """
    tensors = (query, key, value)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        result: Tensor = _FusedAttention.apply(*tensors, padding, scale)
        return result
    return _scaled_dot_product(*tensors, padding, scale)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        scale: float,
    ) -> Tensor:
        inputs = (query, key, value)
        ctx.save_for_backward(*inputs, padding)
        ctx.scale = scale
        ctx.inner = _with_graph(inputs, ctx.needs_input_grad, padding, scale)
        return ctx.inner[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, padding = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            exact = plain_gradients(inputs, padding, ctx.scale, gradient)
            return (*exact, None, None)
        # Given away, so that its memory is free as soon as an ordinary node's would be;
        # a second pass through a retained graph makes it again.
        inner, ctx.inner = ctx.inner, None
        if inner is None:
            inner = _with_graph(inputs, ctx.needs_input_grad, padding, ctx.scale)
        parts, result = inner
        wanted = [part for part in parts if part.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient))
        fast = (next(found) if part.requires_grad else None for part in parts)
        return (*fast, None, None)


def _with_graph(
    inputs: Sequence[Tensor],
    needs_gradient: Sequence[bool],
    padding: Tensor | None,
    scale: float,
) -> tuple[list[Tensor], Tensor]:
    """Return detached inputs and torch's result, with a graph between the two."""
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
    keep = None if padding is None else _keep(padding)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=keep, dropout_p=dropout, scale=scale
    )
    if padding is None:
        return mixed
    # A row without any key is undefined in softmax; we define it as zero.
    return mixed.masked_fill(padding.all(-1)[:, None, None, None], 0.0)


def _keep(padding: Tensor) -> Tensor:
    # torch's attention wants True = attend: turned round here and nowhere else.
    # Rows without a key keep them all, so that no NaN enters the gradient. torch's CPU
    # kernels have given such rows zeros since 2.5; CUDA's are not tested here.
    keep = ~padding | padding.all(-1, keepdim=True)
    return keep[:, None, None, :]
