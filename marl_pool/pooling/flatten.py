"""Concatenation, a control that depends on the order."""

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.utils.errors import InputError, UnfitTokensError


class FlattenPooling(Pooling):
    r"""Linear projection of the concatenated vectors.

    .. math::
        y = W [x_1; \dots; x_N] + b

    It depends on the order and on a fixed number of slots, so it is a control: a
    robustness test that it passes does not measure robustness.

    Shapes: ``(B, N, D)`` to ``(B, D)``; a set with fewer slots than N is read as if
    the missing last ones were padding.

    Args:
        dim: D, the width of the vectors.
        num_tokens: N, the largest number of slots.

    Raises:
        InputError: ``num_tokens`` is below 1.
        UnfitTokensError: from `forward`, more than N slots.
    """

    permutation_invariant = False

    def __init__(self, dim: int, *, num_tokens: int) -> None:
        super().__init__(dim)
        if num_tokens < 1:
            raise InputError(
                f"pooling.num_tokens: expected at least 1, got {num_tokens}"
            )
        self.num_tokens = num_tokens
        self.project = nn.Linear(num_tokens * dim, dim)

    @override
    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        if x.shape[1] > self.num_tokens:
            raise UnfitTokensError(
                f"Flatten: expected at most {self.num_tokens} tokens, got {x.shape[1]}"
            )
        # Missing slots would be zero, so their columns of the weight are left out.
        flat = x.flatten(1)
        weight = self.project.weight[:, : flat.shape[1]]
        return nn.functional.linear(flat, weight, self.project.bias)
