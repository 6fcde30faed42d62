"""Attention by its definition: slower, differentiable any number of times."""

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(
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
        ``(B, H, M, W)``.
    """
    scores = (scale * query) @ key.transpose(-1, -2)
    if padding is None:
        return scores.softmax(-1) @ value
    hidden = padding[:, None, None]
    # Finite, so that a row of padding alone has no NaN in its gradient.
    lowest = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(hidden, lowest).softmax(-1)
    return weights.masked_fill(hidden, 0.0) @ value


def plain_gradients(
    inputs: Sequence[Tensor], padding: Tensor | None, scale: float, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value, for the backward of a fast path.

    In a backward pass with ``create_graph=True`` they can be differentiated again.

    Args:
        inputs: query, key and value.
        padding: as of `plain_attention`.
        scale: of the scores.
        gradient: of the result.

    Returns:
        The three gradients, None for an input that needs none.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that one tensor passed as key and as value is counted once as each.
        parts = [part.view_as(part) for part in inputs]
        result = plain_attention(parts[0], parts[1], parts[2], padding, scale)
        wanted = [part for part in parts if part.requires_grad]
        found = iter(
            torch.autograd.grad(
                result, wanted, gradient.to(result.dtype), create_graph=create_graph
            )
        )
    return tuple(next(found) if part.requires_grad else None for part in parts)
