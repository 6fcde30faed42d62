"""Action masks: which options of an agent's choices are allowed."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from marl_pool.observations.parts import Part, PlainSpace, as_array
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import single_line

MASK = "action_mask"
"""Key of an entry, of an observation or of infos, that says which actions are valid."""


def mask_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the lengths of a mask's rows, in a vector, a matrix or a Tuple of vectors.

    Empty for any other space.
    """
    rows = space.spaces if isinstance(space, spaces.Tuple) else (space,)
    shapes = [(row.shape or ()) if isinstance(row, PlainSpace) else () for row in rows]
    if isinstance(space, PlainSpace) and len(shapes[0]) == 2:
        count, length = shapes[0]
        return (length,) * count
    is_vector = all(len(shape) == 1 for shape in shapes)
    return tuple(size for shape in shapes for size in shape) if is_vector else ()


def fits(sizes: tuple[int, ...], choices: tuple[int, ...]) -> bool:
    """Return whether masks of ``sizes`` fit the choices, in one row or one for each."""
    return bool(choices) and sizes in (choices, (sum(choices),))


@dataclass(frozen=True)
class MaskPart:
    """Storage of the action mask of an observation, in one row."""

    part: Part
    sizes: tuple[int, ...]
    """Lengths of the rows of its space, see `mask_sizes`."""
    space: spaces.Space[Any]

    @classmethod
    def of(cls, space: spaces.Space[Any], number: Any) -> Self:
        """Describe the storage of a mask; ``number`` is the dtype of stored floats."""
        sizes, row = mask_sizes(space), space
        if space.shape != sizes:  # a Tuple or a matrix
            rows = space.spaces if isinstance(space, spaces.Tuple) else (space,)
            row = spaces.MultiBinary(sum(sizes))
            if any(np.dtype(row.dtype).kind == "f" for row in rows):
                row = spaces.Box(-np.inf, np.inf, row.shape, number)
        return cls(Part.of(row, MASK, number), sizes, space)  # type: ignore[arg-type]

    def split(self, rows: np.ndarray) -> Any:
        """Return masks ``(B, L)`` in the form of their space; see `join_masks`."""
        if not isinstance(self.space, spaces.Tuple):
            return rows.reshape(-1, *(self.space.shape or ()))
        masks = np.split(rows, np.cumsum(self.sizes[:-1]), axis=1)
        pairs = zip(masks, self.space.spaces, strict=True)
        return tuple(mask.astype(space.dtype) for mask, space in pairs)


def join_masks(mask: Any, sizes: tuple[int, ...], name: str = MASK) -> Any:
    """Concatenate the masks of several choices; one row is returned as it is.

    Args:
        mask: a row, or a tuple, list or array of rows.
        sizes: lengths of the rows.
        name: start of the error.

    Raises:
        InputError: rows of other lengths.
    """
    if getattr(mask, "ndim", 1) == 2:
        mask = [*mask]
    if not isinstance(mask, tuple | list):
        return mask
    rows = [*map(as_array, mask)]
    # A list of numbers is itself a row.
    if all(row is not None and not row.ndim for row in rows):
        return mask
    lengths = tuple(row.size for row in rows if row is not None and row.ndim == 1)
    if len(lengths) < len(rows) or lengths != sizes:
        expected = f"masks of the sizes {sizes}, one for each choice"
        if len(sizes) == 1:
            expected = f"one row of {sizes[0]} numbers"
        actual = lengths if len(lengths) == len(rows) else _shown(mask)
        raise InputError(f"{name}: expected {expected}, got {actual}")
    return np.concatenate(mask)


def read_mask(mask: Any, choices: tuple[int, ...], name: str) -> np.ndarray:
    """Return the allowed options of a mask that no space describes.

    Args:
        mask: numbers 0 and 1, or bools, in one row or in one for each choice.
        choices: numbers of options.
        name: start of the error.

    Raises:
        InputError: other numbers, or another number of them.
    """
    row = as_array(join_masks(mask, choices, name))
    if row is None or row.shape != (sum(choices),) or not _is_binary(row):
        raise InputError(
            f"{name}: expected {sum(choices)} numbers 0 and 1, got {_shown(mask)}"
        )
    return row != 0


def _is_binary(row: np.ndarray) -> bool:
    return row.dtype.kind in "biuf" and bool(np.isin(row, (0, 1)).all())


def _shown(mask: Any) -> str:
    return single_line(f"{mask!r:.80}")
