"""Hopfield pooling: a learned state falls into what the set has stored."""

import torch
from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import NonNegativeInt, PositiveFloat, PositiveInt


class HopfieldPooling(Pooling):
    """Update a learned state pattern by the vectors as stored patterns; read them.

    ``ξ ← softmax(β ξ Kᵀ) K`` for some updates, then ``y = W_O softmax(β ξ Kᵀ) V``, with
    ``K = LN(x) W_K``, ``V = K W_V`` and ``ξ = LN(s) W_Q`` of a learned s, for each
    head. With no update this is attention from a learned query.

    Source: Ramsauer et al. (2021), *Hopfield Networks is All You Need*, equations 3
    and 10 and the layer `HopfieldPooling` of its section 3. Where we differ: a fixed
    number of updates in place of their threshold, so that no row's result depends on
    its batch; an empty set gives zero.

    Args:
        dim: D, the width of the vectors.
        num_heads: a divisor of ``dim``.
        num_updates: of the state before the vectors are read.
        beta: the inverse temperature; None means 1/√(D / heads). A large one retrieves
            a single vector, a small one the mean of all.

    Raises:
        InputError: ``num_heads`` does not divide ``dim``.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: PositiveInt = 1,
        num_updates: NonNegativeInt = 1,
        beta: PositiveFloat | None = None,
    ) -> None:
        super().__init__(dim)
        if num_heads < 1 or dim % num_heads:
            raise InputError(
                f"pooling.num_heads: expected a divisor of dim = {dim}, got {num_heads}"
            )
        self.num_heads, self.num_updates = num_heads, num_updates
        self.beta = (dim // num_heads) ** -0.5 if beta is None else beta
        self.learned_query = nn.Parameter(torch.randn(dim))
        self.norm_state = nn.LayerNorm(dim)
        self.norm_stored = nn.LayerNorm(dim)
        self.to_query = nn.Linear(dim, dim, bias=False)
        self.to_key = nn.Linear(dim, dim, bias=False)
        self.to_value = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        stored = self.to_key(self.norm_stored(x))
        weights = self._retrieve(stored, padding)
        values = self._split(self.to_value(stored))
        return self.to_out((weights @ values).flatten(1))

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the last retrieval's weights, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        stored = self.to_key(self.norm_stored(x))
        return self._retrieve(stored, padding)[:, :, 0]

    def _retrieve(self, stored: Tensor, padding: Tensor | None) -> Tensor:
        """Weights ``(B, heads, 1, N)`` after all updates; zero under padding."""
        keys = self._split(stored)
        state = self.to_query(self.norm_state(self.learned_query.to(stored.dtype)))
        state = self._split(state.expand(stored.shape[0], 1, -1))
        for _ in range(self.num_updates):
            state = self._attend(state, keys, padding) @ keys
        return self._attend(state, keys, padding)

    def _attend(self, state: Tensor, keys: Tensor, padding: Tensor | None) -> Tensor:
        scores = state @ keys.transpose(-1, -2) * self.beta
        if padding is None:
            return scores.softmax(-1)
        hidden = padding[:, None, None]
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
