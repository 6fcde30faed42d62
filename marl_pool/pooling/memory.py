"""The contract of a pooling head that remembers."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from marl_pool.pooling.base import Pooling

Memory = Any
"""A pytree of tensors, ``(B, …)``; () for none."""


class MemoryPooling(Pooling):
    """A head whose result depends on earlier sets and on the previous action.

    Calling it like any head pools the first set of an episode: no memory yet, and
    zeros for the action. A policy calls `unroll` instead, and carries the memory.

    Args:
        dim: D, the width of the vectors.
        action_dim: A, the width of the previous action; 0 where there is none.
        dim_out: width of the result; ``dim`` if None.
    """

    def __init__(
        self, dim: int, *, action_dim: int = 0, dim_out: int | None = None
    ) -> None:
        super().__init__(dim, dim_out=dim_out)
        self.action_dim = action_dim

    @abstractmethod
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """The memory at an episode's start, ``(batch, …)``."""

    @abstractmethod
    def unroll(
        self, x: Tensor, padding: Tensor | None, actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Pool T sets one after the other.

        Args:
            x: ``(B, T, N, D)``, zero under padding.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            actions: ``(B, T, A)``, the actions before each set.
            memory: from `initial_memory` or an earlier call.

        Returns:
            ``(B, T, dim_out)`` and the memory after the last set.
        """

    @abstractmethod
    def attention_weights(
        self, x: Tensor, padding: Tensor | None, actions: Tensor, memory: Memory
    ) -> Tensor:
        """What share each vector of the last of T sets has, ``(B, heads, N)``."""

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)``, the first sets of B episodes, to ``(B, dim_out)``."""
        return self.unroll(*self._first(x, padding))[0][:, 0]

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """What share each vector of a first set has, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        return self.attention_weights(*self._first(x, padding))

    def _first(
        self, x: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Memory]:
        batch, num_tokens, _ = x.shape
        return (
            x[:, None],
            None if padding is None else padding[:, None],
            torch.zeros(batch, 1, self.action_dim, dtype=x.dtype, device=x.device),
            self.initial_memory(batch, num_tokens),
        )
