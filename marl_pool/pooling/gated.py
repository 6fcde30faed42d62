"""Gated attention: a score that depends on one vector alone."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import masked_softmax
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import PositiveInt


class GatedAttentionPooling(Pooling):
    r"""Weighted mean, with a score of each vector from a gated layer.

    .. math::
        y = \sum_i a_i x_i, \qquad
        a = \mathrm{softmax}_i\left(
            w^\top (\tanh(V x_i) \odot \sigma(U x_i))\right)

    There is no query: a vector's score depends on that vector alone, and the others
    only enter through the softmax's denominator.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Ilse, Tomczak and Welling (2018), *Attention-based Deep Multiple Instance
    Learning*, https://arxiv.org/abs/1802.04712, equations 7 and 9. V and U have biases
    here.

    Args:
        hidden: width of the gated layer; None means D.
    """

    def __init__(self, dim: int, *, hidden: PositiveInt | None = None) -> None:
        super().__init__(dim)
        hidden = hidden or dim
        self.content = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        # A bias would shift all scores alike, and the softmax would cancel it.
        self.score = nn.Linear(hidden, 1, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return (self._weights(x, padding)[:, None] @ x)[:, 0]

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, _ = self.prepare(x, padding, types)
        return self._weights(x, padding)[:, None]

    def _weights(self, x: Tensor, padding: Mask) -> Tensor:
        gated = torch.tanh(self.content(x)) * torch.sigmoid(self.gate(x))
        return masked_softmax(self.score(gated)[..., 0], padding)
