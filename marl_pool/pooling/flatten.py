"""Concatenation, a control that depends on the order."""

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.pooling.base import SlotPooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import PositiveInt


class FlattenPooling(SlotPooling):
    r"""Linear projection of the concatenated vectors.

    .. math::
        y = W [x_1; \dots; x_N] + b

    It depends on the order and on a fixed number of slots, so it is a control: a
    robustness test that it passes does not measure robustness.

    Shapes: ``(B, N, D)`` to ``(B, D)``; see `SlotPooling` for smaller sets.

    Args:
        num_tokens: N, the largest number of slots.
    """

    def __init__(self, dim: int, *, num_tokens: PositiveInt) -> None:
        super().__init__(dim, num_tokens)
        self.project = nn.Linear(num_tokens * dim, dim)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # Missing slots would be zero, so their columns of the weight are left out.
        flat = x.flatten(1)
        weight = self.project.weight[:, : flat.shape[1]]
        return nn.functional.linear(flat, weight, self.project.bias)
