"""Base classes of pooling heads, which map a set of vectors to one vector."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.construction import check_constructor
from marl_pool.options.signatures import check_argument
from marl_pool.options.types import Extent, PositiveInt
from marl_pool.tokens import Mask, Types
from marl_pool.utils.errors import InputError

Memory = Any
"""A pytree of tensors ``(B, …)``; () for a head without a memory."""
Inputs = tuple[Tensor, Mask, Types]
"""Vectors of a set, their padding and their types."""
NO_TYPE = -1
"""The type of a head's extra tokens: they are neither the observer nor an entity."""


class Pooling(nn.Module, ABC):
    """Base class: summarize N vectors of width ``dim`` in one of width ``dim_out``.

    A subclass takes ``dim`` and keyword options, calls ``super().__init__(dim)`` and
    implements `forward`. Calling a head validates the shapes and sets padded vectors to
    zero first, so `forward` contains only the mathematics. The content of padded slots
    never matters, a padded set gives the same result as the shorter set without the
    padding, and an empty set gives a finite result and gradient; tests check this for
    every registered head. A policy re-initializes the weights; see
    `marl_pool.networks.set_network.init_weights`.

    Example:
        >>> class FirstFeature(Pooling):
        ...     def __init__(self, dim: int) -> None:
        ...         super().__init__(dim)
        ...         self.dim_out = 1
        ...
        ...     def forward(self, x, padding=None, types=None):
        ...         return x[..., :1].sum(1)
        >>> FirstFeature(3)(torch.ones(2, 5, 3)).shape
        torch.Size([2, 1])

    Args:
        dim: D, the width of the vectors.

    Attributes:
        dim_out: width of the result; D unless the constructor sets another.
        extra_tokens: number of learned tokens that pass through the encoder with the
            set, for heads such as `ClsPooling`; perturbations never reach them.
        permutation_invariant: True if the order of the vectors does not matter. Options
            may decide it, so ask the instance, not the class.
        keeps_initial_weights: True if a policy must not re-initialize the weights, as
            in heads whose signal passes through several layers; see `Encoder`.
    """

    permutation_invariant: bool = True
    keeps_initial_weights: bool = False
    extra_tokens: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls, "pooling")

    def __init__(self, dim: Extent) -> None:
        super().__init__()
        check_argument("pooling.dim", dim, PositiveInt)
        self.dim = self.dim_out = dim
        if self.extra_tokens:
            self.tokens = nn.Parameter(torch.randn(self.extra_tokens, dim))

    @abstractmethod
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        """Pool each set of a batch to ``(B, dim_out)``.

        Args:
            x: ``(B, N, D)``, zero under padding; the extra tokens come first.
            padding: ``(B, N)`` bool, True = ignore; None where nothing is padded.
            types: ``(B, N)`` int64 token types, 0 = the observer's own.
        """

    def weights(
        self, x: Tensor, padding: Mask = None, types: Types = None
    ) -> Tensor | None:
        """Return the attention weights ``(B, heads, N)``, 0 under padding; or None."""
        return None

    def logits(
        self, x: Tensor, padding: Mask = None, types: Types = None
    ) -> Tensor | None:
        """Return the scores ``(B, heads, N)`` whose softmax the weights are, or None.

        They are the dtype's lowest number under padding.
        """
        return None

    def prepend(self, x: Tensor, padding: Mask = None, types: Types = None) -> Inputs:
        """Prepend the extra tokens, unpadded and of type -1, to the set."""
        if not self.extra_tokens:
            return x, padding, types
        extra = self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)
        if padding is not None:
            padding = torch.cat([padding.new_zeros(extra.shape[:2]), padding], dim=1)
        if types is not None:
            types = torch.cat([types.new_full(extra.shape[:2], NO_TYPE), types], dim=1)
        return torch.cat([extra, x], dim=1), padding, types

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Validate the input, clear it under padding, pool, and validate the result."""
        pooled: Tensor = super().__call__(*self.prepare(x, *args, **kwargs))
        if not isinstance(pooled, Tensor):
            actual = "None" if pooled is None else f"a {type(pooled).__name__}"
            raise self._unfit_result("B", actual)
        if pooled.dim() != 2 or pooled.shape[1] != self.dim_out:
            raise self._unfit_result("B", tuple(pooled.shape))
        # A batch of a symbolic size must not be compared.
        batch = None if torch.compiler.is_compiling() else x.shape[0]
        if type(batch) is int and pooled.shape[0] != batch:
            raise self._unfit_result(batch, tuple(pooled.shape))
        return pooled

    def _unfit_result(self, batch: object, actual: object) -> InputError:
        return InputError(
            f"{type(self).__name__}: expected a result of shape "
            f"({batch}, {self.dim_out}), got {actual}"
        )

    def prepare(self, x: Tensor, padding: Mask = None, types: Types = None) -> Inputs:
        """Validate the shapes and set ``x``, which may be NaN, to 0 under padding."""
        name = type(self).__name__
        for label, tensor in (("x", x), ("padding", padding), ("types", types)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise InputError(
                    f"{name}: expected {label} to be a torch tensor, got "
                    f"{type(tensor).__name__}"
                )
        if x.dim() != 3 or x.shape[-1] != self.dim or x.shape[1] <= self.extra_tokens:
            raise InputError(
                f"{name}: expected x of shape (B, N >= {self.extra_tokens + 1}, "
                f"{self.dim}), got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise InputError(f"{name}: expected x of a floating dtype, got {x.dtype}")
        for label, tensor in (("padding", padding), ("types", types)):
            if tensor is not None and tensor.shape != x.shape[:2]:
                raise InputError(
                    f"{name}: expected {label} of shape {tuple(x.shape[:2])}, "
                    f"got {tuple(tensor.shape)}"
                )
        if padding is not None:
            if padding.dtype != torch.bool:
                raise InputError(
                    f"{name}: expected padding of dtype bool, got {padding.dtype}"
                )
            x = x.masked_fill(padding[..., None], 0.0)
        return x, padding, types


def validate_constructed(head: Pooling, where: str) -> None:
    """Raise InputError unless a constructor set what it has to.

    Args:
        head: the head.
        where: its name, for the message.
    """
    if "_modules" not in vars(head) or not hasattr(head, "dim"):
        raise InputError(
            f"{where}: expected a constructor that calls super().__init__(dim), got "
            "one that does not"
        )
    check_argument(f"{where}: dim_out", head.dim_out, PositiveInt)


class MemoryPooling(Pooling):
    """Base class of heads that also read the previous action and may have a memory.

    Called like any other head, it pools the first set of an episode, with an initial
    memory and zeros as the previous action. A policy calls `unroll` instead, and
    carries the memory from step to step. A padded token keeps its memory. The memory is
    reset at the start of an episode, and for an agent that appears during one.

    Args:
        action_dim: A, the width of the previous action; 0 where there is none.
    """

    def __init__(self, dim: Extent, action_dim: Extent = 0) -> None:
        super().__init__(dim)
        self.action_dim = action_dim

    @abstractmethod
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """Return the memory at the start of an episode, ``(batch, …)``."""

    @abstractmethod
    def unroll(
        self, x: Tensor, padding: Mask, prev_actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Pool T sets to ``(B, T, dim_out)``; also return the memory after the last.

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
