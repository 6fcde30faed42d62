"""Attention by its definition: slow, but differentiable any number of times."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl_pool.kernels.softmax import masked_softmax


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
    """Return the gradients of query, key and value, for the backward of a fast path.

    In a backward pass with ``create_graph=True`` they can be differentiated again.

    Args:
        inputs: query, key and value.
        padding: ``(B, N)`` bool or None.
        scale: factor of the scores.
        gradient: gradient of the result.

    Returns:
        The gradients of the three inputs; None for one that does not require it.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a tensor passed as key and as value has a gradient for each.
        parts = [part.view_as(part) for part in inputs]
        result = plain_attention(parts[0], parts[1], parts[2], padding, scale)
        wanted = [part for part in parts if part.requires_grad]
        found = iter(
            torch.autograd.grad(
                result, wanted, gradient.to(result.dtype), create_graph=create_graph
            )
        )
    return tuple(next(found) if part.requires_grad else None for part in parts)
