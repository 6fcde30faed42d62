"""Hopfield pooling: a learned state retrieves a pattern that the set stores."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.attention import validate_heads
from marl_pool.kernels.functional import masked_softmax
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import NonNegativeInt, PositiveFloat, PositiveInt


class HopfieldPooling(Pooling):
    r"""Retrieval from a modern Hopfield network with the vectors as stored patterns.

    For each head, a learned state pattern s is updated and then reads the values:

    .. math::
        \xi \leftarrow \mathrm{softmax}(\beta\, \xi K^\top) K, \qquad
        y = W_O\, \mathrm{softmax}(\beta\, \xi K^\top) V

    with :math:`K = \mathrm{LN}(x) W_K`, :math:`V = K W_V` and initially
    :math:`\xi = \mathrm{LN}(s) W_Q`. Without updates this is attention from a learned
    query.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Ramsauer et al. (2021), *Hopfield Networks is All You Need*,
    https://arxiv.org/abs/2008.02217, equations 3 and 10 and section 3. Difference from
    the published code: a fixed number of updates instead of a threshold, so that a
    set's result does not depend on the other sets of its batch.

    Args:
        num_heads: number of heads, a divisor of D.
        num_updates: number of updates of the state before it reads the values.
        beta: the inverse temperature; None means 1/√(D / heads). A large one retrieves
            a single vector, a small one the mean of all.
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
        validate_heads("pooling.num_heads", num_heads, dim)
        # The inverse temperature of the retrieval, and the number of its updates.
        self.num_heads, self.num_updates = num_heads, num_updates
        self.beta = (dim // num_heads) ** -0.5 if beta is None else beta
        # The state pattern is learned; the tokens are the stored patterns.
        self.learned_query = nn.Parameter(torch.randn(dim))
        self.norm_state = nn.LayerNorm(dim)
        self.norm_stored = nn.LayerNorm(dim)
        self.to_query = nn.Linear(dim, dim, bias=False)
        self.to_key = nn.Linear(dim, dim, bias=False)
        self.to_value = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        stored = self.to_key(self.norm_stored(x))
        weights = self._retrieve(stored, padding)
        values = self._split_heads(self.to_value(stored))
        return self.to_out((weights @ values).flatten(1))

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        """Return the weights of the last retrieval, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        stored = self.to_key(self.norm_stored(x))
        return self._retrieve(stored, padding)[:, :, 0]

    def _retrieve(self, stored: Tensor, padding: Mask) -> Tensor:
        """Return the weights ``(B, heads, 1, N)`` after all updates."""
        keys = self._split_heads(stored)
        state = self.to_query(self.norm_state(self.learned_query.to(stored.dtype)))
        state = self._split_heads(state.expand(stored.shape[0], 1, -1))
        # Move the state towards the stored patterns, then retrieve.
        for _ in range(self.num_updates):
            state = self._attend(state, keys, padding) @ keys
        return self._attend(state, keys, padding)

    def _attend(self, state: Tensor, keys: Tensor, padding: Mask) -> Tensor:
        ignore = None if padding is None else padding[:, None, None]
        return masked_softmax(state @ keys.mT * self.beta, ignore)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
