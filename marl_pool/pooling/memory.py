"""Base class of pooling heads with a memory of earlier sets."""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types

Memory = Any
"""A pytree of tensors ``(B, …)``; () if there is nothing to remember."""


class MemoryPooling(Pooling):
    """Base class of heads that also read the previous action and may have a memory.

    Called like any head, it pools the first set of an episode, with an initial memory
    and zeros as the previous action. A policy calls `unroll` instead, and carries the
    memory from step to step.

    Args:
        action_dim: A, the width of the previous action; 0 where there is none.
    """

    def __init__(self, dim: int, action_dim: int = 0) -> None:
        super().__init__(dim)
        self.action_dim = action_dim

    @abstractmethod
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """Return the memory at the start of an episode, ``(batch, …)``."""

    @abstractmethod
    def unroll(
        self, x: Tensor, padding: Mask, prev_actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Pool T sets to ``(B, T, dim_out)``; return the memory after the last one too.

        Args:
            x: ``(B, T, N, D)``, zero under padding.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            prev_actions: ``(B, T, A)``, the action taken before each set.
            memory: from `initial_memory` or an earlier call.
        """

    @abstractmethod
    def attention_weights(
        self, x: Tensor, padding: Mask, prev_actions: Tensor, memory: Memory
    ) -> Tensor:
        """Return the weights of the last of T sets, ``(B, heads, N)``; see `unroll`."""

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return self.unroll(*self._first_step(x, padding))[0][:, 0]

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, _ = self.prepare(x, padding, types)
        return self.attention_weights(*self._first_step(x, padding))

    def _first_step(
        self, x: Tensor, padding: Mask
    ) -> tuple[Tensor, Mask, Tensor, Memory]:
        """Return the arguments of `unroll` for sequences of length one."""
        padding = None if padding is None else padding[:, None]
        prev_actions = x.new_zeros(x.shape[0], 1, self.action_dim)
        memory = self.initial_memory(x.shape[0], x.shape[1])
        return x[:, None], padding, prev_actions, memory
