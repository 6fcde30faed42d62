"""Heads without parameters: maximum, mean and sum of each feature."""

import torch
from torch import Tensor

from marl_pool.pooling.base import Pooling


class MaxPooling(Pooling):
    """Maximum of each feature; zero for an empty set.

    Source: the AdaPool paper, equations 4 and 5. Elements that tie share the value
    and the gradient equally (``amax``).
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        if padding is None:
            return x.amax(dim=1)
        lowest = torch.finfo(x.dtype).min
        largest = x.masked_fill(padding[..., None], lowest).amax(dim=1)
        return largest.masked_fill(padding.all(dim=1, keepdim=True), 0.0)


class AvgPooling(Pooling):
    """Mean of each feature over the tokens present; zero for an empty set.

    Source: the AdaPool paper, equations 2 and 3, with N the unpadded tokens.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        if padding is None:
            return x.mean(dim=1)
        present = (~padding).sum(dim=1, keepdim=True).clamp(min=1)
        return x.sum(dim=1) / present

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return 1/N for each token present, ``(B, 1, N)``."""
        present = torch.ones_like(x[..., 0]) if padding is None else (~padding).to(x)
        return (present / present.sum(1, keepdim=True).clamp(min=1))[:, None]


class SumPooling(Pooling):
    """Sum of each feature over the tokens present; zero for an empty set.

    Source: Zaheer et al. (2017), *Deep Sets*, theorem 2. It grows with the number of
    tokens, so more distractors than in training also mean larger vectors.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        return x.sum(dim=1)
