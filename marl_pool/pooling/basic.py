"""Heads without parameters: maximum, mean and sum of each feature."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types


class MaxPooling(Pooling):
    r"""Maximum of each feature over the tokens present.

    .. math::
        y_d = \max_{1 \le i \le N} x_{i,d}

    Extreme values of distractors pass unchanged, so the error grows as soon as noise
    exceeds signal in a feature. There are no attention weights: each feature chooses
    its own token.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    equations 4 and 5. Tokens that tie share the gradient equally (``torch.amax``).

    Example:
        >>> x = torch.tensor([[[1.0, 5.0], [3.0, 2.0]]])
        >>> MaxPooling(2)(x)
        tensor([[3., 5.]])
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        if padding is None:
            return x.amax(dim=1)
        lowest = torch.finfo(x.dtype).min
        largest = x.masked_fill(padding[..., None], lowest).amax(dim=1)
        return largest.masked_fill(padding.all(dim=1, keepdim=True), 0.0)


class AvgPooling(Pooling):
    r"""Mean of each feature over the tokens present.

    .. math::
        y = \frac{1}{N} \sum_{i=1}^N x_i

    All tokens have the weight 1/N, so each distractor dilutes the signal a little more.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    equations 2 and 3.

    Example:
        >>> x = torch.tensor([[[1.0, 5.0], [3.0, 2.0], [9.0, 9.0]]])
        >>> AvgPooling(2)(x, padding=torch.tensor([[False, False, True]]))
        tensor([[2.0000, 3.5000]])
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        if padding is None:
            return x.mean(dim=1)
        present = (~padding).sum(dim=1, keepdim=True).clamp(min=1)
        return x.sum(dim=1) / present

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return uniform_weights(x, padding)[:, None]


class SumPooling(Pooling):
    r"""Sum of each feature over the tokens present.

    .. math::
        y = \sum_{i=1}^N x_i

    The norm grows with the number of tokens, beyond that in training.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Zaheer et al. (2017), *Deep Sets*, https://arxiv.org/abs/1703.06114,
    theorem 2.
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return x.sum(dim=1)


def uniform_weights(x: Tensor, padding: Mask) -> Tensor:
    """Return 1/N for each of the N tokens present, ``(B, slots)``; 0 for padding."""
    present = torch.ones_like(x[..., 0]) if padding is None else (~padding).to(x.dtype)
    return present / present.sum(1, keepdim=True).clamp(min=1)
