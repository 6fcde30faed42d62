"""Learned aggregation: attention across the features of a fixed number of vectors."""

import torch
from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.types import PositiveInt


class LearnedAggregationPooling(Pooling):
    """Mix the vectors by learned weights for each place, then weigh the features.

    ``y = softmax(q W_Q (Xᵀ W_K) / √D) (Xᵀ W_V)`` with ``Xᵀ`` of shape ``(D, N)``,
    ``W_K (N, D)`` and ``W_V (N, P)``.

    What is unusual: unlike attention it turns the set on its side. The softmax runs
    over the D features, not over the vectors, and what each place contributes is a
    column of weights. So it depends on the order and on a fixed N, as `FlattenPooling`
    does, with ``N (D + P)`` weights in place of ``N D P``.

    Source: the post *Learned Aggregation*. It writes √d_k without saying what d_k is;
    here it is D, over which the softmax runs. Where we differ: the batch dimension
    stays for a batch of one, which the post's code squeezes away.

    Args:
        dim: D, the width of the vectors.
        num_tokens: N, the largest number of vectors; a smaller set's last places are
            empty.
        query_dim: n, the width of the learned query; None means D.
        dim_out: P, the width of the result; None means D.

    Raises:
        UnfitTokensError: from `forward`, more vectors than N.
    """

    permutation_invariant = False
    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_tokens: PositiveInt,
        query_dim: PositiveInt | None = None,
        dim_out: PositiveInt | None = None,
    ) -> None:
        super().__init__(dim, dim_out=dim_out)
        if num_tokens < 1:
            raise InputError(
                f"pooling.num_tokens: expected at least 1, got {num_tokens}"
            )
        self.num_tokens = num_tokens
        self.learned_query = nn.Parameter(torch.randn(query_dim or dim))
        self.to_query = nn.Linear(query_dim or dim, dim, bias=False)
        self.to_key = nn.Linear(num_tokens, dim, bias=False)
        self.to_value = nn.Linear(num_tokens, self.dim_out, bias=False)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, P)``; see `Pooling.forward`."""
        count = x.shape[1]
        if count > self.num_tokens:
            raise UnfitTokensError(
                f"LearnedAggregation: expected at most {self.num_tokens} tokens, "
                f"got {count}"
            )
        # A shorter set is one whose last places are padding, and padding is zero.
        on_side = x.transpose(1, 2)
        keys = on_side @ self.to_key.weight[:, :count].T
        values = on_side @ self.to_value.weight[:, :count].T
        query = self.to_query(self.learned_query.to(x.dtype))
        scores = query @ keys / self.dim**0.5
        return (scores.softmax(-1)[:, None] @ values)[:, 0]
