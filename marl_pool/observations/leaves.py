"""Spaces inside an observation whose elements are one array, as tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.observations.parts import Part, PlainSpace
from marl_pool.observations.patches import cut_patches, join_patches
from marl_pool.observations.view import TokenOptions, validate_indices
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

MOST_PATCHES = 64
"""Largest number of patches of an image with the default patch size."""
MOST_OPTIONS = 1 << 14
"""Largest number of options of a choice that becomes a one-hot token."""


class Leaf(ABC):
    """One plain space inside an observation, and the tokens that it becomes.

    Args:
        part: storage of the elements.
        num_tokens: number of its tokens.
        num_features: width of its tokens.
        type_names: names of its types.
        positions: as in `TokenSpec`, if the observation has no other leaf.
    """

    keeps_bytes = False
    """True if features are uint8, which the embedding scales."""
    may_be_absent = False
    """True if the elements say which slots hold no token."""
    is_set = False
    """True if the first dimension of the elements runs over tokens of one kind."""
    mixes_types = False
    """True if a token of any type may be at any place."""

    def __init__(
        self,
        part: Part,
        num_tokens: int,
        num_features: int,
        type_names: tuple[str, ...],
        positions: tuple[int, ...] | None = None,
    ) -> None:
        self.part, self.num_tokens, self.num_features = part, num_tokens, num_features
        self.type_names, self.positions = type_names, positions

    @abstractmethod
    def features(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert stored elements ``(*B, …)`` to features ``(*B, N, F)``."""

    @property
    def markers(self) -> tuple[tuple[str, int], ...]:
        """Types and features that say whether there is a token; none by default."""
        return ()

    def types(self, values: Tensor) -> Tensor:
        """Return types, ``(*B, N)`` int64; by default one for all, or one each."""
        shape = (*self._batch(values), self.num_tokens)
        if len(self.type_names) == 1:
            return torch.zeros(shape, dtype=torch.int64, device=values.device)
        return torch.arange(self.num_tokens, device=values.device).expand(shape)

    def padding(self, values: Tensor) -> Tensor:
        """Return the slots without a token, ``(*B, N)`` bool; none by default."""
        shape = (*self._batch(values), self.num_tokens)
        return torch.zeros(shape, dtype=torch.bool, device=values.device)

    @abstractmethod
    def invert(self, tokens: Tokens) -> Tensor:
        """Convert tokens of this leaf ``(B, N, …)`` to elements ``(B, …)``.

        Types are counted from the first one of this leaf. The inverse of `features`,
        `types` and `padding`, except that elements may be out of bounds.
        """

    def place_types(self) -> list[int]:
        """Return the type of each place, unless `mixes_types`."""
        if len(self.type_names) == 1:
            return [0] * self.num_tokens
        return [*range(self.num_tokens)]

    def _batch(self, values: Tensor) -> torch.Size:
        return values.shape[: values.dim() - len(self.part.shape)]


class VectorLeaf(Leaf):
    """A number or a vector of numbers: one token.

    Args:
        part: storage of the elements, of no or one dimension.
        name: name of the type.
        split: make each number a token, with a separate type.
    """

    def __init__(self, part: Part, name: str, *, split: bool = False) -> None:
        size = int(np.prod(part.shape))
        if split:
            names = tuple(f"{name or 'feature'}_{i}" for i in range(size))
            super().__init__(part, size, 1, names, positions=())
        else:
            super().__init__(part, 1, size, (name,))

    @override
    def features(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (*self._batch(values), self.num_tokens, self.num_features)
        return values.to(dtype).reshape(shape)

    @override
    def invert(self, tokens: Tokens) -> Tensor:
        return tokens.features.reshape(-1, *self.part.shape)


class RowsLeaf(Leaf):
    """A matrix: each row is a token.

    Args:
        part: storage of the elements, ``(N, F)``.
        name: name of the type.
        options: which rows are not tokens, and where their types are.
        split: give each row a separate type.
    """

    def __init__(
        self, part: Part, name: str, options: TokenOptions, *, split: bool = False
    ) -> None:
        self.zero_rows = options.padding == "zero_rows"
        self.presence = presence_of(name, options)
        self.columns = options.type_features
        self.may_be_absent = self.zero_rows or self.presence is not None
        self.mixes_types = self.columns is not None
        self.is_set = not split
        count = part.shape[0]
        names: tuple[str, ...] = (name or "row",)
        if self.columns is not None:
            names = tuple(f"{name or 'type'}_{i}" for i in range(len(self.columns)))
        elif split:
            names = tuple(f"{name or 'row'}_{i}" for i in range(count))
        super().__init__(part, count, part.shape[1], names)

    @override
    def features(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype)

    @override
    def types(self, values: Tensor) -> Tensor:
        if self.columns is None:
            return super().types(values)
        return values[..., list(self.columns)].to(torch.float32).argmax(-1)

    @property
    @override
    def markers(self) -> tuple[tuple[str, int], ...]:
        if self.presence is None:
            return ()
        return tuple((name, self.presence) for name in self.type_names)

    @override
    def padding(self, values: Tensor) -> Tensor:
        padding = super().padding(values)
        if self.zero_rows:
            padding = padding | (values == 0).all(-1)
        if self.presence is not None:
            padding = padding | (values[..., self.presence] == 0)
        return padding

    @override
    def invert(self, tokens: Tokens) -> Tensor:
        features = tokens.features.clone()
        if self.columns is not None:
            # Swap the largest of the type columns with the column of the token's type.
            columns = torch.tensor(self.columns, device=features.device)
            largest = columns[features[..., columns].argmax(-1)][..., None]
            column = columns[tokens.types][..., None]
            pair = features.gather(-1, largest), features.gather(-1, column)
            features = features.scatter(-1, column, pair[0])
            features = features.scatter(-1, largest, pair[1])
        if self.presence is not None:
            # A reading of 0, as from a dead sensor, would mean that there is no token.
            readings = features[..., self.presence]
            silent = (readings == 0) & ~tokens.padding
            features[..., self.presence] = readings.masked_fill(silent, 1)
        return features


class ChoiceLeaf(Leaf):
    """Choices, each a one-hot token: one, a vector of separate types, or rows.

    Args:
        space: Discrete, or MultiDiscrete of one or two dimensions. In two dimensions
            the choices of a row are joined to one token, and the rows are of one type.
        part: storage of the elements.
        name: name of the type.
    """

    def __init__(
        self, space: spaces.Discrete | spaces.MultiDiscrete, part: Part, name: str
    ) -> None:
        name = name or "choice"
        several = isinstance(space, spaces.MultiDiscrete)
        counts = np.asarray(space.nvec if several else space.n)  # type: ignore[union-attr]
        self.start = torch.as_tensor(np.asarray(space.start), dtype=torch.int64)
        # Each column has as many features as the largest of its counts.
        rows = counts.reshape(-1, *(counts.shape[1:] or (1,)))
        self.widths = [int(width) for width in rows.max(0)]
        names: tuple[str, ...] = (name,)
        if counts.ndim == 1 and len(counts) > 1:
            names = tuple(f"{name}_{i}" for i in range(len(counts)))
        super().__init__(part, len(rows), sum(self.widths), names, positions=())

    @override
    def features(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        values = values - self.start.to(values.device)
        shape = (*self._batch(values), self.num_tokens, len(self.widths))
        columns = values.reshape(shape).unbind(-1)
        # A number out of range, such as an absent agent's, becomes zeros.
        coded = [
            column[..., None] == torch.arange(width, device=values.device)
            for column, width in zip(columns, self.widths, strict=True)
        ]
        return torch.cat(coded, -1).to(dtype)

    @override
    def invert(self, tokens: Tokens) -> Tensor:
        coded = tokens.features.split(self.widths, -1)
        options = torch.stack([column.argmax(-1) for column in coded], -1)
        values = options.reshape(-1, *self.part.shape)
        return values + self.start.to(values.device)


class ImageLeaf(Leaf):
    """An image cut into patches, each a token of its place and its pixels.

    The first two features are the row and column of the patch, from 0 to 1 in the
    image; its pixels follow by rows, each with its channels. At the bottom and right,
    patches are padded with zeros. Bytes whose bound is 255 stay bytes.

    Args:
        part: storage of the elements, ``(H, W)`` or three dimensions with channels.
        name: name of the type.
        options: size of a patch and the axis of the channels.
        prefix: start of errors about options.
    """

    def __init__(
        self, part: Part, name: str, options: TokenOptions, prefix: str
    ) -> None:
        self.first = options.channels == "first" and len(part.shape) == 3
        shape = part.shape if len(part.shape) == 3 else (*part.shape, 1)
        height, width, channels = (*shape[1:], shape[0]) if self.first else shape
        self.size = height, width
        self.patch = options.patch or _default_patch(height, width)
        if self.patch > max(height, width):
            raise InputError(
                f"{prefix}patch: expected at most {max(height, width)}, since the "
                f"image has {height} x {width} pixels, got {self.patch}"
            )
        self.scaled = part.dtype == np.uint8 and bool(part.high.max() == 255)
        self.rows, self.columns = (-(-size // self.patch) for size in (height, width))
        super().__init__(
            part,
            self.rows * self.columns,
            2 + self.patch**2 * channels,
            (name or "patch",),
            positions=(0, 1),
        )

    @property
    def keeps_bytes(self) -> bool:  # type: ignore[override]
        """True if features are uint8, which the embedding scales."""
        return self.scaled

    @override
    def features(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if len(self.part.shape) == 2:
            values = values[..., None]
        elif self.first:
            values = values.movedim(-3, -1)
        pixels = cut_patches(values, self.patch, dtype)
        # Bytes are divided by 255 in the embedding, and places with them.
        place = [
            torch.linspace(0, 255 if dtype == torch.uint8 else 1, size)
            for size in (self.rows, self.columns)
        ]
        places = torch.cartesian_prod(*place).to(pixels.device, dtype)
        if dtype != torch.uint8 and self.scaled:
            pixels = pixels / 255
        return torch.cat([places.expand(*pixels.shape[:-1], 2), pixels], -1)

    @override
    def invert(self, tokens: Tokens) -> Tensor:
        images = join_patches(tokens.features[..., 2:], self.patch, self.size)
        # `features` divided them, unless the image was alone.
        if self.scaled and images.dtype != torch.uint8:
            images = images * 255
        if len(self.part.shape) == 2:
            return images[..., 0]
        return images.movedim(-1, -3) if self.first else images


def _default_patch(height: int, width: int) -> int:
    patch = 1
    while -(-height // patch) * -(-width // patch) > MOST_PATCHES:
        patch += 1
    return patch


def make_leaf(
    space: PlainSpace,
    name: str,
    options: TokenOptions,
    number: Any,
    *,
    alone: bool,
    are_rows: bool = False,
    prefix: str = "",
) -> Leaf:
    """Return the tokens of a plain space that `refusal` accepts.

    Args:
        space: the space.
        name: its path in the observation, empty for the whole.
        options: how it becomes tokens.
        number: NumPy dtype in which floats are stored.
        alone: True if the observation has no other leaf.
        are_rows: True for a matrix of rows that is no image, whatever its bounds are.
        prefix: start of errors about options.
    """
    part = Part.of(space, name, number)
    dims = len(part.shape)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return ChoiceLeaf(space, part, name)
    if dims < 2:
        return VectorLeaf(part, name, split=alone and dims == 1)
    if not are_rows and is_image(space, options):
        return ImageLeaf(part, name, options, prefix)
    if (presence := presence_of(name, options)) is not None:
        validate_indices(f"{prefix}presence", [presence], part.shape[1])
    if options.type_features is not None:
        key = f"{prefix}type_features"
        validate_indices(key, options.type_features, part.shape[1])
    # If there are as many names as rows, they name the rows.
    split = alone and len(options.token_types or ()) == part.shape[0] > 1
    return RowsLeaf(part, name, options, split=split)


def presence_of(name: str, options: TokenOptions) -> int | None:
    """Return the index of a matrix's feature for presence; None if it has none.

    Args:
        name: path of the matrix, empty for the whole observation.
        options: how it becomes tokens.
    """
    presence = options.presence
    return presence.get(name) if isinstance(presence, Mapping) else presence


def is_image(space: spaces.Space[Any], options: TokenOptions) -> bool:
    """Return whether the elements of a space are cut into patches."""
    kinds = spaces.Box | spaces.MultiBinary
    if not isinstance(space, kinds) or len(space.shape or ()) not in (2, 3):
        return False
    if len(space.shape) == 3 or options.patch is not None:
        return True
    return space.dtype == np.uint8 and bool((space.high == 255).all())  # type: ignore[union-attr]
