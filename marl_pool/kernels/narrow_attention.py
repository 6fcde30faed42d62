"""Exact softmax attention on a CPU for narrow heads, of width one to three.

The AdaPool paper's policies have as many heads as features, so a query, a key and a
value are one number each; in its set studies they are two. Then torch's
`scaled_dot_product_attention` spends its time in matrix products of a tiny inner
dimension. For a query q,

    o(q) = Σ_j e_j v_j / Σ_j e_j,   e_j = exp(s q · k_j),
    do_a/dq_b = s (mean of k_b v_a - mean of k_b · mean of v_a), with the weights e,

so all the sums for the result and its gradient are one product of the weights e with
the columns 1, v, k and k v. Three more things make it fast:

- The keys are centered on the middle of their range. Then the largest score of a query
  is small, and a bound on it follows from the range: no pass over the scores to find
  it, and none to subtract it unless it is large.
- ``exp2`` costs a third of ``exp``, so scores are in units of ln 2.
- Scores are computed in chunks that fit the cache, and recomputed for the gradient.

There are 1 + 2 W + W² columns for heads of width W, so it pays up to `WIDEST`.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from marl_pool.kernels.functional import plain_gradients

WIDEST = 3
"""Wider heads are faster in `scaled_dot_product_attention`."""

CHUNK = 1 << 19
"""Scores in memory at a time, 2 MB of float32."""

LIMIT = 30.0 / math.log(2)
"""Largest score, in units of ln 2, that is exponentiated without subtracting it."""

_LN2 = math.log(2)
_scratch = threading.local()


def narrow_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scale: float
) -> Tensor:
    """Return ``softmax(scale · q kᵀ) v``; the arguments are as in `plain_attention`.

    It can be differentiated twice.
    """
    tensors = (query, key, value)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _NarrowAttention.apply(*tensors, padding, scale)
    return _attend(*tensors, padding, scale, for_gradient=False)[0]


class _NarrowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.scale = arguments  # query, key, value and padding
        result, saved = _attend(*arguments, for_gradient=True)
        ctx.save_for_backward(*tensors, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, padding, q, k, v, peak, total, means, ignore = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *plain_gradients(inputs, padding, ctx.scale, gradient), None, None
        width = len(q)
        g = _to_rows(gradient)
        mean_v, mean_k, mean_kv = _split(means, width)
        pull = (g * mean_v).sum(0)
        # The query's gradient is a covariance of keys and values under the weights.
        for_query = ctx.scale * ((g * mean_kv).sum(1) - mean_k * pull)
        columns = g.new_empty(2 * width + width * width, *g.shape[1:])
        scaled, offset, products = _split(columns, width)
        torch.div(g, total, out=scaled)
        torch.mul(q, pull / total, out=offset)
        torch.mul(q[:, None], scaled, out=products)
        # Sums over the queries give the gradients of keys and values.
        sums = _products(columns, q, k, None if peak is None else peak[:, :, None])
        for_value, offset, pulls = _split(sums, width)
        # `q` contains scale / ln 2, of which the keys' gradient must contain the scale
        # alone.
        for_key = ((v * pulls).sum(1) - offset).mul_(_LN2)
        # Padded tokens have no gradient.
        if ignore is not None:
            for_key = for_key.masked_fill(ignore, 0.0)
            for_value = for_value.masked_fill(ignore, 0.0)
        rows = gradient.shape[:2]
        gradients = (_from_rows(part, rows) for part in (for_query, for_key, for_value))
        return (*gradients, None, None)


def _to_rows(x: Tensor) -> Tensor:
    """Permute ``(B, H, N, W)`` to ``(W, B H, N)``, so that operations run along N."""
    return x.permute(3, 0, 1, 2).flatten(1, 2).contiguous()


def _from_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Permute ``(W, B H, N)`` to ``(B, H, N, W)``."""
    return x.unflatten(1, rows).permute(1, 2, 3, 0)


def _split(columns: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``(2 W + W², n, N)`` into W, W and ``(W, W)`` columns."""
    first, second, products = columns.split([width, width, width * width])
    return first, second, products.unflatten(0, (width, width))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    scale: float,
    *,
    for_gradient: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the result, and the tensors to save for its gradient."""
    heads, width = query.shape[1], query.shape[3]
    # The weights are powers of 2, which cost less than powers of e.
    q = _to_rows(query) * (scale / _LN2)
    ignore = None
    if padding is not None:
        ignore = padding[:, None].expand(-1, heads, -1).flatten(0, 1)
    columns, low, high, mean = _columns(_to_rows(key), _to_rows(value), ignore)
    v, k, _ = _split(columns[1:], width)
    peak = _peak(k, q, low, high, ignore)
    # Without a gradient the columns 1 and v suffice.
    used = columns if for_gradient else columns[: 1 + width]
    sums = _products(used, k, q, None if peak is None else peak[:, None, :])
    total = sums[0]
    if ignore is not None:
        # An empty set has the sum 0, by which the other sums cannot be divided.
        total = total.clamp(min=torch.finfo(q.dtype).tiny)
    means = sums[1:] / total
    # Values were centered on their mean.
    result = _from_rows(means[:width] + mean, query.shape[:2])
    return result, (q, k, v, peak, total, means, ignore)


def _peak(
    k: Tensor, q: Tensor, low: Tensor, high: Tensor, ignore: Tensor | None
) -> Tensor | None:
    """Return each query's largest score, ``(n, M)``, or None if all are small.

    It is computed like the scores, so that it is equal to the largest of them to the
    bit. For heads of width one it is the score of the smallest or the largest key.
    """
    # Each product is largest at an end of the keys' range.
    bound = torch.maximum(q * low, q * high).sum(0)
    # `amax` refuses empty tensors.
    if not bound.numel() or bound.amax() <= LIMIT:
        return None
    if len(q) == 1:
        return bound
    peak = torch.empty_like(bound)
    for rows, scores in _chunks(k, q):
        if ignore is not None:
            # Padded keys are at the center, where they may have the largest score.
            scores.masked_fill_(ignore[rows, :, None], torch.finfo(k.dtype).min)
        torch.amax(scores, 1, out=peak[rows])
    return peak if ignore is None else peak.masked_fill(ignore.all(1)[:, None], 0.0)


def _columns(
    k: Tensor, v: Tensor, ignore: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Center keys on the middle of their range, and values on their mean.

    Args:
        k: ``(W, n, N)`` keys.
        v: ``(W, n, N)`` values.
        ignore: ``(n, N)`` bool, or None.

    Returns:
        ``(1 + 2 W + W², n, N)``: 1, v, k and k v, zero under padding; then the smallest
        and the largest of the centered keys and the mean value, ``(W, n, 1)`` each.
    """
    width = len(k)
    # Filled in place: stacking separate tensors costs as much as the rest of this.
    columns = k.new_empty(1 + 2 * width + width * width, *k.shape[1:])
    # Find the range of the keys and the mean of the values, over present tokens.
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
    # Center, and multiply each key with each value.
    middle = (low + high) / 2
    values, keys, products = _split(columns[1:], width)
    torch.sub(v, mean, out=values)
    torch.sub(k, middle, out=keys)
    if ignore is not None:
        # Padding then adds 0 to each sum, whatever its weight.
        columns[1 : 1 + 2 * width].masked_fill_(ignore, 0.0)
    torch.mul(keys[:, None], values, out=products)
    return columns, low - middle, high - middle, mean


def _products(
    columns: Tensor, inner: Tensor, outer: Tensor, peak: Tensor | None
) -> Tensor:
    """Sum ``columns`` over ``inner``, weighted by 2^(inner · outer - peak).

    Args:
        columns: ``(C, n, I)``.
        inner: ``(W, n, I)``, summed over.
        outer: ``(W, n, O)``.
        peak: each query's largest score, ``(n, 1, O)`` or ``(n, I, 1)``; None for 0.

    Returns:
        ``(C, n, O)``.
    """
    columns = columns.transpose(0, 1)
    result = columns.new_empty(*columns.shape[:2], outer.shape[2])
    for rows, scores in _chunks(inner, outer):
        if peak is not None:
            scores -= peak[rows]
            if len(inner) > 2:
                scores.clamp_(max=0.0)  # only padding is above
        torch.bmm(columns[rows], scores.exp2_(), out=result[rows])
    return result.transpose(0, 1)


def _chunks(inner: Tensor, outer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their scores ``(rows, I, O)``, in memory that is reused."""
    width, count, inside = inner.shape
    outside = outer.shape[2]
    # Take as many rows at a time as fit the cache.
    step = max(1, CHUNK // max(1, inside * outside))
    memory = _scratch_memory(inner, min(step, count) * inside * outside)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        size = rows.stop - start
        scores = memory[: size * inside * outside].view(size, inside, outside)
        if width == 1:
            torch.mul(inner[0, rows, :, None], outer[0, rows, None], out=scores)
        else:
            inner_rows = inner[:, rows].permute(1, 2, 0)
            torch.bmm(inner_rows, outer[:, rows].transpose(0, 1), out=scores)
        yield rows, scores


def _scratch_memory(like: Tensor, count: int) -> Tensor:
    """Return a tensor kept between calls: new pages cost as much as the exponentials.

    It is an ordinary tensor even if inference mode is on when it is first needed, since
    a later gradient could not write to an inference tensor.
    """
    tensors: dict[torch.dtype, Tensor] = _scratch.__dict__.setdefault("tensors", {})
    memory = tensors.get(like.dtype)
    if memory is None or len(memory) < count:
        size = max(count, CHUNK)
        with torch.inference_mode(False):
            memory = torch.empty(size, dtype=like.dtype, device=like.device)
        tensors[like.dtype] = memory
    return memory
