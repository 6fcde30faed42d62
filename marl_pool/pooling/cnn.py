"""A CNN on tokens laid out as a grid, a control that depends on the order."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.pooling.base import SlotPooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt


class CNNPooling(SlotPooling):
    """Convolutions over N vectors in rows on the smallest square grid.

    Each vector passes one ReLU layer, which for image patches is a convolution whose
    stride is the patch; then come 3 × 3 convolutions of stride 2 and one linear layer,
    each with ReLU. The head depends on the order and on N: a control like ``flatten``,
    and a teacher of agents that do not know the order.

    Shapes: ``(B, N, D)`` to ``(B, width)``; see `SlotPooling` for smaller sets.

    Args:
        num_tokens: N, the largest number of slots.
        channels: widths of the layer on each vector and of the convolutions after it.
        width: width of the result.

    Raises:
        InputError: no channels.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_tokens: PositiveInt,
        channels: Sequence[PositiveInt] = (32, 32),
        width: PositiveInt = 128,
    ) -> None:
        super().__init__(dim, num_tokens)
        if not channels:
            raise InputError("pooling.channels: expected widths of at least 1, got []")
        self.dim_out = width
        self.side = side = math.isqrt(num_tokens - 1) + 1
        self.embed = nn.Linear(dim, channels[0])
        self.convolutions = nn.ModuleList()
        for pair in pairwise(channels):
            self.convolutions.append(nn.Conv2d(*pair, 3, stride=2, padding=1))
            side = (side + 1) // 2
        self.project = nn.Linear(channels[-1] * side * side, width)
        for layer in (self.embed, *self.convolutions, self.project):
            nn.init.orthogonal_(layer.weight, gain=2**0.5)
            nn.init.zeros_(layer.bias)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # Fill the grid with zeros, as padded slots are.
        missing = self.side * self.side - x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, missing))
        grid = self.embed(x).relu().transpose(1, 2)
        grid = grid.unflatten(2, (self.side, self.side))
        for convolution in self.convolutions:
            grid = convolution(grid).relu()
        return self.project(grid.flatten(1)).relu()
