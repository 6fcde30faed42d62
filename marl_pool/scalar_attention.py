"""Exact softmax attention for heads of width one, on a CPU.

The AdaPool paper's policies have as many heads as features, so a query, a key and a
value are one number each. `scaled_dot_product_attention` then spends its time in
matrix products with an inner dimension of one. Written out, a query q gives

    o(q) = Σ_j e_j v_j / Σ_j e_j,   e_j = exp(s q k_j),
    do/dq = s (mean of k v - mean of k · mean of v), means with the weights e,

so that all the sums a query needs, for the result and its own gradient, are one
product with the columns 1, v, k and k v. Three things make it faster:

- the keys are centred on the middle of their range, so that the largest score of a
  query is small and belongs to the least or the largest key: no pass over the scores
  to find it, and none to subtract it unless it is large;
- ``exp2`` costs a third of ``exp``: the scores are kept in units of ln 2;
- scores are made in pieces that stay in the cache, and made again for the gradient.
"""

import math
import threading
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 19
"""Scores held at a time, 2 MB of float32."""

LIMIT = 30.0 / math.log(2)
"""Largest score, in units of ln 2, that is taken as it is."""

_LN2 = math.log(2)
_scratch = threading.local()


def scalar_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scale: float
) -> Tensor:
    """Return ``softmax(scale · q kᵀ) v``.

    Args:
        query: ``(B, H, M, 1)``.
        key: ``(B, H, N, 1)``.
        value: ``(B, H, N, 1)``.
        padding: ``(B, N)`` bool, True = ignore. A row of padding alone gives zero.
        scale: of the scores.

    Returns:
        ``(B, H, M, 1)``, differentiable once.
    """
    tensors = (query, key, value)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _ScalarAttention.apply(*tensors, padding, scale)
    return _attend(*tensors, padding, scale, for_gradient=False)[0]


class _ScalarAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        scale: float,
    ) -> Tensor:
        result, saved = _attend(query, key, value, padding, scale, for_gradient=True)
        ctx.save_for_backward(*saved)
        ctx.scale = scale
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, peak, total, means, ignore = ctx.saved_tensors
        g = gradient.reshape(q.shape)
        mean_v, mean_k, mean_kv = means.unbind(1)
        for_query = ctx.scale * g * (mean_kv - mean_k * mean_v)
        share = g / total
        pull = share * q
        columns = torch.stack([share, pull, pull * mean_v], dim=1)
        for_value, pulls, pulls_mean = _products(
            columns, q, k, None if peak is None else peak[:, :, None]
        ).unbind(1)
        for_key = _LN2 * (v * pulls - pulls_mean)
        if ignore is not None:
            for_key = for_key.masked_fill(ignore, 0.0)
            for_value = for_value.masked_fill(ignore, 0.0)
        batch, heads = gradient.shape[:2]
        return (
            for_query.view(batch, heads, -1, 1),
            for_key.view(batch, heads, -1, 1),
            for_value.reshape(batch, heads, -1, 1),
            None,
            None,
        )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    scale: float,
    *,
    for_gradient: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the result and what the gradient needs of the way to it."""
    shape = query.shape
    q = query.reshape(-1, shape[2]) * (scale / _LN2)
    k, v = key.reshape(len(q), -1), value.reshape(len(q), -1)
    ignore = None if padding is None else _rows(padding, heads=shape[1])
    columns, low, high, mean = _columns(k, v, ignore)
    k = columns[:, 2]
    # Made as the scores are, so that the largest of them is exactly this.
    highest = torch.maximum(q * low, q * high)
    peak = highest if highest.amax() > LIMIT else None
    wanted = columns if for_gradient else columns[:, :2]
    sums = _products(wanted, k, q, None if peak is None else peak[:, None, :])
    total = sums[:, :1]
    if ignore is not None:
        # An empty set: zero over anything is zero.
        total = total.clamp(min=torch.finfo(q.dtype).tiny)
    means = sums[:, 1:] / total
    result = (means[:, 0] + mean).view(shape)
    return result, (q, k, columns[:, 1], peak, total[:, 0], means, ignore)


def _rows(padding: Tensor, heads: int) -> Tensor:
    """From ``(B, N)`` to ``(B · heads, N)``."""
    return padding[:, None].expand(-1, heads, -1).flatten(0, 1)


def _columns(
    k: Tensor, v: Tensor, ignore: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centre keys on the middle of their range and values on their mean.

    Args:
        k: ``(n, N)`` keys.
        v: ``(n, N)`` values.
        ignore: ``(n, N)`` bool, or None.

    Returns:
        ``(n, 4, N)``: 1, v, k and k v, zero under padding; then the least and the
        largest of the centred keys and the mean value, ``(n, 1)`` each.
    """
    # Filled in place: a stack of separate tensors costs as much as all else here.
    columns = k.new_empty(len(k), 4, k.shape[1])
    if ignore is None:
        low, high = k.aminmax(dim=1, keepdim=True)
        mean = v.mean(dim=1, keepdim=True)
        columns[:, 0] = 1.0
    else:
        empty = ignore.all(dim=1, keepdim=True)
        low = k.masked_fill(ignore, math.inf).amin(1, keepdim=True)
        high = k.masked_fill(ignore, -math.inf).amax(1, keepdim=True)
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        present = (~ignore).sum(1, keepdim=True).clamp(min=1)
        mean = v.masked_fill(ignore, 0.0).sum(1, keepdim=True) / present
        columns[:, 0] = ~ignore
    middle = (low + high) / 2
    torch.sub(v, mean, out=columns[:, 1])
    torch.sub(k, middle, out=columns[:, 2])
    if ignore is not None:
        columns[:, 1:3].masked_fill_(ignore[:, None], 0.0)
    torch.mul(columns[:, 1], columns[:, 2], out=columns[:, 3])
    return columns, low - middle, high - middle, mean


def _products(
    columns: Tensor, inner: Tensor, outer: Tensor, peak: Tensor | None
) -> Tensor:
    """Sum ``columns`` over ``inner``, weighted by 2^(inner · outer - peak).

    Args:
        columns: ``(n, C, I)``.
        inner: ``(n, I)``, what is summed over.
        outer: ``(n, O)``.
        peak: each query's largest score, ``(n, 1, O)`` or ``(n, I, 1)``; None for 0.

    Returns:
        ``(n, C, O)``.
    """
    count, inside, outside = len(columns), inner.shape[1], outer.shape[1]
    result = columns.new_empty(count, columns.shape[1], outside)
    step = max(1, PIECE // (inside * outside))
    room = _room(columns, min(step, count) * inside * outside)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        size = rows.stop - start
        scores = room[: size * inside * outside].view(size, inside, outside)
        torch.mul(inner[rows, :, None], outer[rows, None, :], out=scores)
        if peak is not None:
            scores -= peak[rows]
        torch.bmm(columns[rows], scores.exp2_(), out=result[rows])
    return result


def _room(like: Tensor, count: int) -> Tensor:
    """Memory kept between calls: fresh pages cost as much as the exponentials."""
    rooms: dict[torch.dtype, Tensor] = _scratch.__dict__.setdefault("rooms", {})
    room = rooms.get(like.dtype)
    if room is None or len(room) < count:
        room = rooms[like.dtype] = like.new_empty(max(count, PIECE))
    return room
