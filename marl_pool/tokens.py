"""Sets of tokens, and their specification."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.options.signatures import check_argument, options_of
from marl_pool.options.types import AtMost, Extent
from marl_pool.utils.errors import InputError

SELF_TYPE = 0
"""Type of the observing agent's own token, if there is one."""

Mask = Tensor | None
"""Padding mask of a set, ``(*B, N)`` bool, True = ignore; None without padding."""
Types = Tensor | None
"""Types of a set's tokens, ``(*B, N)`` int64, 0 = the observer; None if unknown."""


class Tokens(NamedTuple):
    """A batch of sets of tokens; a pytree of tensors, batch dimensions first.

    An absent action mask is a None leaf of the pytree.

    ``padding`` is torch's ``key_padding_mask``: True marks a slot without a token. Its
    features and types are arbitrary, NaN included; networks and heads clear them.
    Type 0 is the observer's own token where `TokenSpec.has_self`.

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
    action_mask: Tensor | None = None
    """``(*B, num_options)`` bool, True for the allowed options of the choices, see
    `ActionSpec`; None if all are allowed. The row of an agent that does not act may
    allow none.
    """

    @property
    def batch_shape(self) -> torch.Size:
        """The batch dimensions ``B``."""
        return self.types.shape[:-1]

    @property
    def num_tokens(self) -> int:
        """``N``, padded slots included."""
        return self.types.shape[-1]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tokens":
        """Apply ``function`` to each of the tensors."""
        return Tokens(*map(function, self.parts))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors, without an absent action mask."""
        return self[:3] if self.action_mask is None else self  # type: ignore[return-value]

    @property
    def columns(self) -> dict[str, Tensor]:
        """The `parts` by name."""
        return dict(zip(self._fields, self.parts, strict=False))

    def at(self, index: Any) -> "Tokens":
        """Apply ``[index]`` to the batch dimensions of all tensors."""
        return self.map(lambda tensor: tensor[index])

    def validate_shapes(self) -> None:
        """Raise InputError unless features, types and a bool padding match in shape."""
        for part in self[:3]:
            if not isinstance(part, Tensor):
                raise InputError(f"tokens: expected torch tensors, got {form_of(part)}")
        shape = self.features.shape[:-1]
        for name, part in (("types", self.types), ("padding", self.padding)):
            if part.shape != shape:
                raise InputError(
                    f"tokens: expected {name} of shape {tuple(shape)}, got "
                    f"{tuple(part.shape)}"
                )
        if self.padding.dtype != torch.bool:
            raise InputError(
                f"tokens: expected padding of dtype bool, got {self.padding.dtype}"
            )

    def flatten_batch(self) -> "Tokens":
        """Merge all batch dimensions into one; the shapes are validated.

        Raises:
            InputError: the shapes do not match, or there is no batch dimension.
        """
        self.validate_shapes()
        dims = len(self.batch_shape)
        if not dims:
            raise InputError(
                "tokens: expected at least one batch dimension, got features of shape "
                f"{tuple(self.features.shape)}"
            )
        return self if dims == 1 else self.map(lambda t: t.flatten(0, dims - 1))


def self_first(numbers: Tensor, count: int) -> Tensor:
    """Return ``(m, count)`` int64 indices of a set, each row's own member first.

    Row i has ``numbers[i]``, then the others of 0, 1, …, ``count`` - 1 in order.
    """
    places = torch.arange(count - 1, device=numbers.device)
    return torch.cat((numbers[:, None], places + (places >= numbers[:, None])), 1)


def like(mask: Tensor, tensor: Tensor) -> Tensor:
    """View a mask ``(*B)`` as ``(*B, 1, …)``, to broadcast to a tensor ``(*B, …)``."""
    return mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim()))


def form_of(value: object) -> str:
    """Describe a value by its type, or a tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


def unknown_type(types: Tensor, padding: Mask, num_types: int) -> InputError:
    """Build the error for tokens of which some have a type outside of ``[0, K)``."""
    wrong = (types < 0) | (types >= num_types)
    if padding is not None:
        wrong &= ~padding
    return InputError(
        f"tokens: expected types from 0 to {num_types - 1}, got {types[wrong][0]}"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def append(tokens: Tokens, added: Tokens) -> Tokens:
    """Append the slots of ``added`` to ``tokens``, whose action mask is kept."""
    joined = map(torch.cat, zip(tokens[:3], added[:3], strict=True), (-2, -1, -1))
    return tokens._replace(**dict(zip(Tokens._fields, joined, strict=False)))


def take_features(features: Tensor, origin: Tensor) -> Tensor:
    """Reorder tokens' features ``(*B, N, F)`` by ``origin`` ``(*B, M)``."""
    return features.gather(
        -2, origin[..., None].expand(*origin.shape, features.shape[-1])
    )


def identity_origin(tokens: Tokens) -> Tensor:
    """Return the ``origin`` of unmoved tokens, ``(*B, N)`` int64."""
    places = torch.arange(tokens.num_tokens, device=tokens.types.device)
    return places.expand_as(tokens.types)


def drop_tokens(tokens: Tokens, probability: float, has_self: bool) -> Tokens:
    """Hide each token with a given probability, by padding it.

    The observer's own token is kept or, without one, a random token of each set, so
    each of N tokens is hidden with a probability of p - p^N / N. The random numbers
    come from torch's global generator.

    Args:
        tokens: tokens of batch ``(*B,)``.
        probability: in [0, 1), of each token that is present.
        has_self: True if a token of type 0 is the observer's own.
    """
    numbers = torch.rand(tokens.padding.shape, device=tokens.padding.device)
    if has_self:
        numbers = numbers.masked_fill(tokens.types == SELF_TYPE, 2.0)
    # Keep the token with the largest number: the observer's own, or a random one.
    kept = numbers.masked_fill(tokens.padding, -1.0).argmax(-1, keepdim=True)
    dropped = (numbers < probability).scatter(-1, kept, False)
    return tokens._replace(padding=tokens.padding | dropped)


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
        dtype: of the features; uint8 for bytes from 0 to 255, which the embedding
            scales to [0, 1].
        signal_types: names of the types that matter for the task, the observer's own
            included; the others are noise. Empty if the type does not determine this.
        positions: indices of the features that hold the token's position; () for
            tokens without a position, None if unknown.
        num_frames: number of observations stacked in the features, oldest first, each
            with the same number of features; 1 for the current one alone.
        markers: pairs of a type's name and the index of a feature that marks whether
            such a token is present; noise leaves it unchanged.

    Raises:
        InputError: a value of another type, a size below 1, no type name, a signal type
            or marker of an unknown type, or positions, markers or frames that the
            features cannot hold.
    """

    num_tokens: Extent
    num_features: Extent
    type_names: tuple[str, ...]
    has_self: bool = True
    dtype: Literal["float32", "uint8"] = "float32"
    signal_types: tuple[str, ...] = ()
    positions: tuple[Extent, ...] | None = None
    num_frames: Annotated[int, AtMost(1024)] = 1
    markers: tuple[tuple[str, Extent], ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists for tuples; sets and arrays will do, too.
        for name in ("type_names", "signal_types", "positions"):
            values = getattr(self, name)
            if isinstance(values, Iterable) and not isinstance(values, str):
                object.__setattr__(self, name, tuple(values))
        for name, option in options_of(TokenSpec).items():
            check_argument(f"TokenSpec.{name}", getattr(self, name), option.annotation)
        markers = tuple((name, index) for name, index in self.markers)
        object.__setattr__(self, "markers", markers)
        # All sizes are positive, and all names and indices exist.
        for name in ("num_tokens", "num_features", "num_frames"):
            self._validate(name, getattr(self, name) >= 1, "at least 1")
        names, width = self.type_names, self.num_features
        self._validate("type_names", bool(names), "at least one name")
        are_types = {*self.signal_types} <= {*names}
        self._validate(
            "signal_types", are_types, f"some of {', '.join(map(repr, names))}"
        )
        divides = width % self.num_frames == 0
        self._validate("num_frames", divides, f"a divisor of num_features = {width}")
        inside = all(0 <= index < width for index in self.positions or ())
        self._validate("positions", inside, f"indices of features below {width}")
        exist = all(name in names and 0 <= index < width for name, index in markers)
        self._validate("markers", exist, f"types with indices below {width}")

    def _validate(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            value = getattr(self, name)
            raise InputError(f"TokenSpec.{name}: expected {expected}, got {value}")

    @property
    def num_types(self) -> int:
        """K, the number of token types."""
        return len(self.type_names)

    def space(self) -> spaces.Dict:
        """Return the observation space of one agent."""
        low, high = (0, 255) if self.dtype == "uint8" else (-np.inf, np.inf)
        shape, count = (self.num_tokens, self.num_features), (self.num_tokens,)
        return spaces.Dict(
            features=spaces.Box(low, high, shape, np.dtype(self.dtype).type),
            types=spaces.Box(0, self.num_types - 1, count, np.int64),
            padding=spaces.Box(0, 1, count, np.bool_),  # type: ignore[arg-type]
        )

    def zeros(self, batch: int) -> Tokens:
        """Return ``batch`` sets of unpadded zeros, to try out a network."""
        shape = (batch, self.num_tokens)
        return Tokens(
            torch.zeros(*shape, self.num_features, dtype=getattr(torch, self.dtype)),
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.bool),
        )

    def numbered(self) -> "TokenSpec":
        """Return the specification with a separate type for each slot."""
        names = tuple(f"token_{i}" for i in range(self.num_tokens))
        return replace(
            self, type_names=names, has_self=False, signal_types=(), markers=()
        )

    def check(self, tokens: Tokens, where: str = "tokens") -> None:
        """Raise InputError if ``tokens`` differ in number or width."""
        actual = tuple(tokens.features.shape[-2:])
        if actual != (self.num_tokens, self.num_features):
            raise InputError(
                f"{where}: expected (..., {self.num_tokens}, {self.num_features}), "
                f"got (..., {', '.join(map(str, actual))})"
            )

    def to_json(self) -> dict[str, Any]:
        """Return keyword arguments of an equal `TokenSpec`, ready for JSON."""
        return asdict(self)
