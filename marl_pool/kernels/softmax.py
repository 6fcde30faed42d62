"""Softmax over scores of which some are padding."""

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, ignore: Tensor | None, dim: int = -1) -> Tensor:
    """Return the softmax of ``scores`` along ``dim``, zero where ``ignore`` is True.

    Where everything along ``dim`` is ignored all weights are zero, and the gradient is
    finite.

    Args:
        scores: of any shape.
        ignore: bool, broadcast to ``scores``; None where nothing is ignored.
        dim: the dimension to normalize.
    """
    if ignore is None:
        return scores.softmax(dim)
    # A finite number instead of -inf, whose softmax over an empty set would be NaN.
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(ignore, lowest).softmax(dim).masked_fill(ignore, 0.0)
