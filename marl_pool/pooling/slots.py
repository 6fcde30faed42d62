"""Heads with separate weights for each slot: controls that depend on the order."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.types import Extent, Size
from marl_pool.pooling.base import Inputs, Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.errors import InputError, UnfitTokensError


class SlotPooling(Pooling):
    """Base class of heads with separate weights for each of N slots.

    They depend on the order. A set with fewer than N slots is read as if padded at the
    end; one with more raises an `UnfitTokensError`.

    Args:
        num_tokens: N, the largest number of slots.
    """

    permutation_invariant = False

    def __init__(self, dim: Extent, num_tokens: Extent) -> None:
        super().__init__(dim)
        self.num_tokens = num_tokens

    @override
    def prepare(self, x: Tensor, padding: Mask = None, types: Types = None) -> Inputs:
        x, padding, types = super().prepare(x, padding, types)
        if x.shape[1] > self.num_tokens:
            raise UnfitTokensError(
                f"{type(self).__name__}: expected at most {self.num_tokens} tokens, "
                f"got {x.shape[1]}"
            )
        return x, padding, types


class FlattenPooling(SlotPooling):
    r"""Linear projection of the concatenated vectors: a control that sees their order.

    .. math::
        y = W [x_1; \dots; x_N] + b

    A control: a robustness test that it passes does not measure robustness.

    Shapes: ``(B, N, D)`` to ``(B, D)``; see `SlotPooling` for smaller sets.
    """

    def __init__(self, dim: Extent, *, num_tokens: Size) -> None:
        super().__init__(dim, num_tokens)
        self.project = nn.Linear(num_tokens * dim, dim)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # Missing slots would be zero, so their columns of the weight are left out.
        flat = x.flatten(1)
        weight = self.project.weight[:, : flat.shape[1]]
        return nn.functional.linear(flat, weight, self.project.bias)


class CNNPooling(SlotPooling):
    """Convolutions over N vectors, laid out row by row on the smallest square grid.

    Each vector passes through one ReLU layer, which for image patches is a convolution
    whose stride is the patch size; 3 × 3 convolutions of stride 2 and one linear layer
    follow, each with ReLU. A control, and a teacher for agents that do not know the
    order.

    Shapes: ``(B, N, D)`` to ``(B, width)``; see `SlotPooling` for smaller sets.

    Args:
        channels: widths of the layer on each vector and of the convolutions after it.
        width: width of the result.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: Extent,
        *,
        num_tokens: Size,
        channels: Sequence[Size] = (32, 32),
        width: Size = 128,
    ) -> None:
        super().__init__(dim, num_tokens)
        if not channels:
            raise InputError("pooling.channels: expected widths of at least 1, got []")
        self.dim_out = width
        # Tokens fill a square grid, slot by slot.
        self.side = side = math.isqrt(num_tokens - 1) + 1
        self.embed = nn.Linear(dim, channels[0])
        # Each convolution halves the grid's side.
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
        # Fill the rest of the grid with zeros, like padded slots.
        missing = self.side * self.side - x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, missing))
        grid = self.embed(x).relu().transpose(1, 2)
        grid = grid.unflatten(2, (self.side, self.side))
        for convolution in self.convolutions:
            grid = convolution(grid).relu()
        return self.project(grid.flatten(1)).relu()


class LearnedAggregationPooling(SlotPooling):
    r"""Attention over the D features, with learned weights for each slot of the set.

    .. math::
        y = \mathrm{softmax}\left(\frac{q W_Q\,(X^\top W_K)}{\sqrt{D}}\right)
            (X^\top W_V)

    :math:`X^\top` is ``(D, N)``, :math:`W_K` is ``(N, D)`` and :math:`W_V` is
    ``(N, P)``: unlike usual attention, the set is transposed. The softmax runs over
    features, and a vector contributes through the row of :math:`W_K` and :math:`W_V`
    that belongs to its slot: N (D + P) weights instead of `FlattenPooling`'s N D P.

    Shapes: ``(B, N, D)`` to ``(B, P)``; see `SlotPooling` for smaller sets.

    Source: the blog post *Learned Aggregation*, which divides by √d_k without defining
    d_k; here it is D, the size that the softmax runs over.

    Args:
        query_dim: width of the learned query q; None means D.
        dim_out: P, the width of the result; None means D.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: Extent,
        *,
        num_tokens: Size,
        query_dim: Size | None = None,
        dim_out: Size | None = None,
    ) -> None:
        super().__init__(dim, num_tokens)
        self.dim_out = dim_out or dim
        self.learned_query = nn.Parameter(torch.randn(query_dim or dim))
        self.to_query = nn.Linear(query_dim or dim, dim, bias=False)
        self.to_key = nn.Linear(num_tokens, dim, bias=False)
        self.to_value = nn.Linear(num_tokens, self.dim_out, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # Missing slots would be zero, so their columns of the weights are left out.
        count, features = x.shape[1], x.transpose(1, 2)
        keys = features @ self.to_key.weight[:, :count].T
        values = features @ self.to_value.weight[:, :count].T
        query = self.to_query(self.learned_query.to(x.dtype))
        scores = query @ keys / self.dim**0.5
        return (scores.softmax(-1)[:, None] @ values)[:, 0]
