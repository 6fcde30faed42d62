"""Exact softmax attention for narrow heads, of width one or a few, on a CPU.

The AdaPool paper's policies have as many heads as features, so a query, a key and a
value are one number each; in its set studies they are two. Then torch's
`scaled_dot_product_attention` spends its time in matrix products with an inner
dimension that small. Written out, a query q gives

    o(q) = Σ_j e_j v_j / Σ_j e_j,   e_j = exp(s q · k_j),
    do_a/dq_b = s (mean of k_b v_a - mean of k_b · mean of v_a), with the weights e,

so that all the sums a query needs, for the result and its own gradient, are one
product with the columns 1, v, k and k v. Three things make it faster:

- the keys are centred on the middle of their range, so that the largest score of a
  query is small and its bound follows from the range: no pass over the scores to find
  it, and none to subtract it unless it is large;
- ``exp2`` costs a third of ``exp``: the scores are kept in units of ln 2;
- scores are made in pieces that stay in the cache, and made again for the gradient.

There are 1 + 2 W + W² columns for heads of width W, so it pays up to `WIDEST`.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from marl_pool.kernels.plain_attention import plain_gradients

WIDEST = 3
"""Wider heads are faster in `scaled_dot_product_attention`."""

PIECE = 1 << 19
"""Scores held at a time, 2 MB of float32."""

LIMIT = 30.0 / math.log(2)
"""Largest score, in units of ln 2, that is taken as it is."""

_LN2 = math.log(2)
_scratch = threading.local()


def narrow_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scale: float
) -> Tensor:
    """Return ``softmax(scale · q kᵀ) v``.

    Args:
        query: ``(B, H, M, W)``.
        key: ``(B, H, N, W)``.
        value: ``(B, H, N, W)``.
        padding: ``(B, N)`` bool, True = ignore. A row of padding alone gives zero.
        scale: of the scores.

    Returns:
        ``(B, H, M, W)``. A gradient of the gradient is that of `plain_attention`.
    """
    tensors = (query, key, value)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _NarrowAttention.apply(*tensors, padding, scale)
    return _attend(*tensors, padding, scale, for_gradient=False)[0]


class _NarrowAttention(torch.autograd.Function):
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
        ctx.save_for_backward(query, key, value, padding, *saved)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, padding, q, k, v, peak, total, means, ignore = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            exact = plain_gradients(inputs, padding, ctx.scale, gradient)
            return (*exact, None, None)
        width = len(q)
        g = _across(gradient)
        mean_v, mean_k, mean_kv = _split(means, width)
        pull = (g * mean_v).sum(0)
        for_query = ctx.scale * ((g * mean_kv).sum(1) - mean_k * pull)
        columns = g.new_empty(2 * width + width * width, *g.shape[1:])
        share, less, both = _split(columns, width)
        torch.div(g, total, out=share)
        torch.mul(q, pull / total, out=less)
        torch.mul(q[:, None], share, out=both)
        sums = _products(columns, q, k, None if peak is None else peak[:, :, None])
        for_value, less, pulls = _split(sums, width)
        for_key = ((v * pulls).sum(1) - less).mul_(_LN2)
        if ignore is not None:
            for_key = for_key.masked_fill(ignore, 0.0)
            for_value = for_value.masked_fill(ignore, 0.0)
        rows = gradient.shape[:2]
        each = (_back(part, rows) for part in (for_query, for_key, for_value))
        return (*each, None, None)


def _across(x: Tensor) -> Tensor:
    """From ``(B, H, N, W)`` to ``(W, B · H, N)``, so that operations run along N."""
    return x.permute(3, 0, 1, 2).flatten(1, 2).contiguous()


def _back(x: Tensor, rows: Sequence[int]) -> Tensor:
    """From ``(W, B · H, N)`` to ``(B, H, N, W)``."""
    return x.unflatten(1, rows).permute(1, 2, 3, 0)


def _split(columns: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """From ``(2 W + W², n, N)`` to W, W and ``(W, W)`` columns."""
    first, second, both = columns.split([width, width, width * width])
    return first, second, both.unflatten(0, (width, width))


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
    heads, width = query.shape[1], query.shape[3]
    q = _across(query) * (scale / _LN2)
    ignore = None if padding is None else _rows(padding, heads)
    columns, low, high, mean = _columns(_across(key), _across(value), ignore)
    v, k, _ = _split(columns[1:], width)
    peak = _peak(k, q, low, high, ignore)
    wanted = columns if for_gradient else columns[: 1 + width]
    sums = _products(wanted, k, q, None if peak is None else peak[:, None, :])
    total = sums[0]
    if ignore is not None:
        # An empty set: zero over anything is zero.
        total = total.clamp(min=torch.finfo(q.dtype).tiny)
    means = sums[1:] / total
    result = _back(means[:width] + mean, query.shape[:2])
    return result, (q, k, v, peak, total, means, ignore)


def _rows(padding: Tensor, heads: int) -> Tensor:
    """From ``(B, N)`` to ``(B · heads, N)``."""
    return padding[:, None].expand(-1, heads, -1).flatten(0, 1)


def _peak(
    k: Tensor, q: Tensor, low: Tensor, high: Tensor, ignore: Tensor | None
) -> Tensor | None:
    """Return each query's largest score, ``(n, M)``, or None where all are small.

    Made as the scores are, so that the largest of them is exactly this: for heads of
    width one, where it belongs to the least or the largest key, from the range alone.
    """
    bound = torch.maximum(q * low, q * high).sum(0)
    if not bound.numel() or bound.amax() <= LIMIT:
        return None
    if len(q) == 1:
        return bound
    peak = torch.empty_like(bound)
    for rows, scores in _pieces(k, q):
        if ignore is not None:
            # Padding lies in the middle, where in three dimensions it may be nearest.
            scores.masked_fill_(ignore[rows, :, None], torch.finfo(k.dtype).min)
        torch.amax(scores, 1, out=peak[rows])
    return peak if ignore is None else peak.masked_fill(ignore.all(1)[:, None], 0.0)


def _columns(
    k: Tensor, v: Tensor, ignore: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centre keys on the middle of their range and values on their mean.

    Args:
        k: ``(W, n, N)`` keys.
        v: ``(W, n, N)`` values.
        ignore: ``(n, N)`` bool, or None.

    Returns:
        ``(1 + 2 W + W², n, N)``: 1, v, k and k v, zero under padding; then the least
        and the largest of the centred keys and the mean value, ``(W, n, 1)`` each.
    """
    width = len(k)
    # Filled in place: a stack of separate tensors costs as much as all else here.
    columns = k.new_empty(1 + 2 * width + width * width, *k.shape[1:])
    if ignore is None:
        low, high = k.aminmax(dim=2, keepdim=True)
        mean = v.mean(dim=2, keepdim=True)
        columns[0] = 1.0
    else:
        empty = ignore.all(dim=1, keepdim=True)
        low = k.masked_fill(ignore, math.inf).amin(2, keepdim=True)
        high = k.masked_fill(ignore, -math.inf).amax(2, keepdim=True)
        low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        present = (~ignore).sum(1, keepdim=True).clamp(min=1)
        mean = v.masked_fill(ignore, 0.0).sum(2, keepdim=True) / present
        columns[0] = ~ignore
    middle = (low + high) / 2
    values, keys, both = _split(columns[1:], width)
    torch.sub(v, mean, out=values)
    torch.sub(k, middle, out=keys)
    if ignore is not None:
        columns[1 : 1 + 2 * width].masked_fill_(ignore, 0.0)
    torch.mul(keys[:, None], values, out=both)
    return columns, low - middle, high - middle, mean


def _products(
    columns: Tensor, inner: Tensor, outer: Tensor, peak: Tensor | None
) -> Tensor:
    """Sum ``columns`` over ``inner``, weighted by 2^(inner · outer - peak).

    Args:
        columns: ``(C, n, I)``.
        inner: ``(W, n, I)``, what is summed over.
        outer: ``(W, n, O)``.
        peak: each query's largest score, ``(n, 1, O)`` or ``(n, I, 1)``; None for 0.

    Returns:
        ``(C, n, O)``.
    """
    columns = columns.transpose(0, 1)
    result = columns.new_empty(*columns.shape[:2], outer.shape[2])
    for rows, scores in _pieces(inner, outer):
        if peak is not None:
            scores -= peak[rows]
            if len(inner) > 2:
                scores.clamp_(max=0.0)  # what lies above is padding
        torch.bmm(columns[rows], scores.exp2_(), out=result[rows])
    return result.transpose(0, 1)


def _pieces(inner: Tensor, outer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their scores ``(rows, I, O)``, in memory that is used again."""
    width, count, inside = inner.shape
    outside = outer.shape[2]
    step = max(1, PIECE // max(1, inside * outside))
    room = _room(inner, min(step, count) * inside * outside)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        size = rows.stop - start
        scores = room[: size * inside * outside].view(size, inside, outside)
        if width == 1:
            torch.mul(inner[0, rows, :, None], outer[0, rows, None], out=scores)
        else:
            left, right = (
                inner[:, rows].permute(1, 2, 0),
                outer[:, rows].transpose(0, 1),
            )
            torch.bmm(left, right, out=scores)
        yield rows, scores


def _room(like: Tensor, count: int) -> Tensor:
    """Return memory kept between calls: fresh pages cost as much as the exponentials.

    It is an ordinary tensor also where it is first needed in inference mode: gradients
    could not write to an inference tensor later.
    """
    rooms: dict[torch.dtype, Tensor] = _scratch.__dict__.setdefault("rooms", {})
    room = rooms.get(like.dtype)
    if room is None or len(room) < count:
        with torch.inference_mode(False):
            room = torch.empty(max(count, PIECE), dtype=like.dtype, device=like.device)
        rooms[like.dtype] = room
    return room
