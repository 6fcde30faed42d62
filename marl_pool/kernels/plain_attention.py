"""Attention by its definition: slow, but differentiable any number of times."""

from collections.abc import Sequence

from torch import Tensor

from marl_pool.kernels.functional import input_gradients, masked_softmax


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scale: float
) -> Tensor:
    """Return ``softmax(scale · q kᵀ) v``.

    Args:
        query: ``(B, H, M, W)``.
        key: ``(B, H, N, W)``.
        value: ``(B, H, N, W)``.
        padding: ``(B, N)`` bool, True = ignore. An empty set gives zero.
        scale: factor of the scores.

    Returns:
        ``(B, H, M, W)``.
    """
    scores = (scale * query) @ key.transpose(-1, -2)
    ignore = None if padding is None else padding[:, None, None]
    return masked_softmax(scores, ignore) @ value


def plain_gradients(
    inputs: Sequence[Tensor], padding: Tensor | None, scale: float, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value, which are differentiable again.

    They are the gradients of a fast path in a backward pass with ``create_graph=True``.

    Args:
        inputs: query, key and value.
        padding: ``(B, N)`` bool or None.
        scale: factor of the scores.
        gradient: gradient of the result.
    """
    # Views, so that a tensor passed as key and as value has a gradient for each.
    query, key, value = parts = [part.view_as(part) for part in inputs]
    result = plain_attention(query, key, value, padding, scale)
    return input_gradients(result, parts, gradient.to(result.dtype), create_graph=True)
