"""Sets of tokens, and their specification."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.utils.errors import InputError

SELF_TYPE = 0
"""The type of the observing agent's own token, where there is one."""

Mask = Tensor | None
"""Padding of a set, ``(*B, N)`` bool, True = ignore; None where nothing is padded."""
Types = Tensor | None
"""Types of a set's tokens, ``(*B, N)`` int64, 0 = the observer's own; None: unknown."""


class Tokens(NamedTuple):
    """A batch of sets of tokens; a pytree of tensors, batch dimensions first.

    ``padding`` means the same as torch's ``key_padding_mask`` everywhere in the
    package: True marks a slot without a token, which is to be ignored. Features and
    types of such a slot are arbitrary, NaN included.

    Example:
        >>> tokens = Tokens(
        ...     features=torch.randn(2, 5, 3),
        ...     types=torch.zeros(2, 5, dtype=torch.int64),
        ...     padding=torch.zeros(2, 5, dtype=torch.bool),
        ... )
        >>> tokens.batch_shape, tokens.num_tokens
        (torch.Size([2]), 5)
    """

    features: Tensor
    """``(*B, N, F)`` float32, or uint8 for images (scaled in the embedding)."""
    types: Tensor
    """``(*B, N)`` int64 in ``[0, K)``; 0 is the observer's own token."""
    padding: Tensor
    """``(*B, N)`` bool, True where the slot holds no token."""

    @property
    def batch_shape(self) -> torch.Size:
        """The batch dimensions ``B``."""
        return self.types.shape[:-1]

    @property
    def num_tokens(self) -> int:
        """``N``, padded slots included."""
        return self.types.shape[-1]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tokens":
        """Apply ``function`` to each of the three tensors."""
        return Tokens(*(function(tensor) for tensor in self))

    def at(self, index: Any) -> "Tokens":
        """Apply ``[index]`` to the batch dimensions of all three tensors."""
        return self.map(lambda tensor: tensor[index])

    def flatten_batch(self) -> "Tokens":
        """Merge all batch dimensions into one."""
        dims = len(self.batch_shape)
        if dims == 1:
            return self
        return self.map(lambda tensor: tensor.flatten(0, dims - 1))


@dataclass(frozen=True)
class TokenSpec:
    """Sizes and type names of the tokens that an agent observes.

    Args:
        num_tokens: N, the number of slots, at least 1.
        num_features: F, the features of a token, at least 1.
        type_names: name of each type; with ``has_self``, ``type_names[0]`` is the
            observer's own.
        has_self: True if a token of type 0 is the observer's own. Sets of sensor
            channels and of image patches have none.
        dtype: dtype of the features.
        signal_types: names of the types that matter for the task, the observer's own
            included; the others are noise. Empty if the type does not determine this.
        positions: indices of the features that hold the token's position; () for
            tokens without a position, None if unknown.
        num_frames: number of observations that the features stack, oldest first, each
            with the same number of features; 1 for the current one alone.

    Raises:
        InputError: a size below 1, no type name, signal of an unknown type, or
            positions or frames that the features cannot hold.
    """

    num_tokens: int
    num_features: int
    type_names: tuple[str, ...]
    has_self: bool = True
    dtype: Literal["float32", "uint8"] = "float32"
    signal_types: tuple[str, ...] = ()
    positions: tuple[int, ...] | None = None
    num_frames: int = 1

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_features", "num_frames"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"TokenSpec.{name}: expected at least 1, got {getattr(self, name)}"
                )
        if not self.type_names:
            raise InputError("TokenSpec.type_names: expected at least one name, got ()")
        for name in ("type_names", "signal_types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not set(self.signal_types) <= set(self.type_names):
            raise InputError(
                f"TokenSpec.signal_types: expected some of {', '.join(self.type_names)}"
                f", got {', '.join(self.signal_types)}"
            )
        if self.num_features % self.num_frames:
            raise InputError(
                f"TokenSpec.num_frames: expected a divisor of num_features = "
                f"{self.num_features}, got {self.num_frames}"
            )
        if self.positions is not None:
            object.__setattr__(self, "positions", tuple(self.positions))
            if not set(self.positions) <= set(range(self.num_features)):
                raise InputError(
                    f"TokenSpec.positions: expected indices of features below "
                    f"{self.num_features}, got {list(self.positions)}"
                )

    @property
    def num_types(self) -> int:
        """K, the number of token types."""
        return len(self.type_names)

    def space(self) -> spaces.Dict:
        """Return the observation space of one agent."""
        shape = (self.num_tokens, self.num_features)
        if self.dtype == "uint8":
            features = spaces.Box(0, 255, shape, np.uint8)
        else:
            features = spaces.Box(-np.inf, np.inf, shape, np.float32)
        count = (self.num_tokens,)
        return spaces.Dict(
            features=features,
            types=spaces.Box(0, self.num_types - 1, count, np.int64),
            padding=spaces.Box(0, 1, count, np.bool_),  # type: ignore[arg-type]
        )

    def check(self, tokens: Tokens, where: str = "tokens") -> None:
        """Raise InputError if ``tokens`` do not have this form."""
        expected = (self.num_tokens, self.num_features)
        got = tuple(tokens.features.shape[-2:])
        if got != expected:
            raise InputError(f"{where}: expected (..., {expected}), got (..., {got})")

    def to_json(self) -> dict[str, Any]:
        """Return keyword arguments of an equal `TokenSpec`, ready for JSON."""
        return asdict(self)
