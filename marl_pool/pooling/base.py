"""The contract of a pooling head: a set of vectors in, one vector out."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from marl_pool.utils.errors import InputError

NO_TYPE = -1
"""The type of a head's own token inside the encoder."""


class Pooling(nn.Module, ABC):
    """Summarise N vectors of width ``dim`` by one of width ``dim_out``.

    A head of your own derives from this class, takes ``dim`` and keyword options,
    calls ``super().__init__(dim)`` and writes `forward`. Calling a head checks the
    shapes and clears what lies under padding, so `forward` holds only mathematics.
    Inside a policy (`SetNetwork`) the weights of Linear and Embedding layers and
    parameters named ``tokens`` or ``learned_query`` are initialized anew to
    N(0, init_std), and the biases of Linear layers to 0, unless the class says
    ``keeps_initial_weights = True``.

    Args:
        dim: D, the width of the vectors.
        dim_out: width of the result; ``dim`` if None.
        extra_tokens: learned tokens that the head wants inside the encoder.

    Attributes:
        permutation_invariant: whether the result ignores the order of the vectors.
            It belongs to the instance: options may decide it.
        keeps_initial_weights: whether a policy leaves them as the head drew them, as
            heads need whose result passes several layers; see `Encoder`.
    """

    permutation_invariant: bool = True
    keeps_initial_weights: bool = False

    def __init__(
        self, dim: int, *, dim_out: int | None = None, extra_tokens: int = 0
    ) -> None:
        super().__init__()
        if dim < 1:
            raise InputError(f"pooling.dim: expected at least 1, got {dim}")
        self.dim = dim
        self.dim_out = dim if dim_out is None else dim_out
        self.extra_tokens = extra_tokens
        if extra_tokens:
            self.tokens = nn.Parameter(torch.randn(extra_tokens, dim))

    @abstractmethod
    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool.

        Args:
            x: ``(B, N, D)``, zero under padding; the extra tokens come first.
            padding: ``(B, N)`` bool, True = ignore; None where nothing is padded.
            types: ``(B, N)`` int64 token types, 0 = the observer's own.

        Returns:
            ``(B, dim_out)``.
        """

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor | None:
        """Return what share each vector has, ``(B, heads, N)``, or None if undefined.

        The shares are those of the head's own N input vectors and zero under padding.
        """
        return None

    def logits(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor | None:
        """Return the scores whose softmax the weights are, or None if there are none.

        ``(B, heads, N)``, scale included, the lowest number under padding.
        """
        return None

    def prepend(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        types: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Put the extra tokens before ``x``, for the encoder; without any, a no-op.

        Their type is -1: 0 stands for the observer and any other for an entity.
        """
        count = self.extra_tokens
        if not count:
            return x, padding, types
        own = self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)
        x = torch.cat([own, x], dim=1)
        if padding is not None:
            padding = torch.cat([padding.new_zeros(x.shape[0], count), padding], dim=1)
        if types is not None:
            types = torch.cat(
                [types.new_full((x.shape[0], count), NO_TYPE), types], dim=1
            )
        return x, padding, types

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Check, clear what lies under padding, and pool."""
        x, padding, types = self.prepare(x, *args, **kwargs)
        return super().__call__(x, padding, types)

    def prepare(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Check the shapes and zero ``x`` under ``padding``, where NaN may lie."""
        name = type(self).__name__
        if x.dim() != 3 or x.shape[-1] != self.dim or x.shape[1] <= self.extra_tokens:
            least = self.extra_tokens + 1
            raise InputError(
                f"{name}: expected x of shape (B, N >= {least}, {self.dim}), "
                f"got {tuple(x.shape)}"
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
