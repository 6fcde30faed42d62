"""Concatenation: the control that a shuffle must break."""

from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.utils.errors import InputError, UnfitTokensError


class FlattenPooling(Pooling):
    """Concatenate N vectors in their order and project them to one.

    It depends on the order and on a fixed N. It is here as a control: a robustness
    test that it passes tests nothing.

    Args:
        dim: D, the width of the vectors.
        num_tokens: N, the only cardinality that it takes.
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

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, num_tokens, D)`` to ``(B, D)``; see `Pooling.forward`."""
        if x.shape[1] > self.num_tokens:
            raise UnfitTokensError(
                f"Flatten: expected at most {self.num_tokens} tokens, got {x.shape[1]}"
            )
        # A shorter set is one whose last slots are padding, and padding is zero.
        flat = x.flatten(1)
        weight = self.project.weight[:, : flat.shape[1]]
        return nn.functional.linear(flat, weight, self.project.bias)
