"""Storage of observations in arrays, with checks of everything that is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from marl_pool.utils.errors import InputError
from marl_pool.utils.text import single_line

ROUNDING = 1e-4
"""Relative amount by which floats may exceed the bounds of their space."""
COMPACT = (np.dtype(np.bool_), np.dtype(np.uint8), np.dtype(np.int8))
"""Dtypes that are stored as they are; other integers become int64."""

PlainSpace = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
"""Spaces whose elements are one array."""


def label(name: str) -> str:
    """Return the start of errors about a part; empty for the whole observation."""
    return f"part {name!r}: " if name else ""


def as_array(value: Any) -> np.ndarray | None:
    """Convert to an array; None for ragged data, or a tensor that requires grad."""
    # Without gradients, torch would convert such a tensor.
    if getattr(value, "requires_grad", False):
        return None
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        return None


def summary_of(value: Any) -> str:
    """Describe a value in one line, such as ``a Dict of cars, goal``."""
    if isinstance(value, Mapping):
        return f"a Dict of {', '.join(map(str, value)) or 'nothing'}"[:200]
    return f"{type(value).__name__} {single_line(f'{value!r:.80}')}"


@dataclass(frozen=True, eq=False)
class Part:
    """Storage of the elements of one space inside an observation."""

    label: str
    """Start of errors; see `label`."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Dtype in which elements are stored."""
    declared: np.dtype[Any]
    """Dtype of the space."""
    low: np.ndarray
    """Bounds of each number, of ``shape`` or scalar; both belong to the space."""
    high: np.ndarray
    reason: str = "as in its space"
    """Why numbers have these bounds, for errors."""

    @classmethod
    def of(cls, space: PlainSpace, name: str, number: Any) -> Self:
        """Describe the storage of a space.

        Args:
            space: a space whose elements are one array.
            name: name of the part, empty for the whole observation.
            number: dtype in which floats are stored.
        """
        low: Any
        high: Any
        match space:
            case spaces.Box():
                low, high = space.low, space.high
            case spaces.Discrete():
                first = int(space.start)
                low, high = first, first + int(space.n) - 1
            case spaces.MultiDiscrete():
                counts: np.ndarray = np.asarray(space.nvec, np.int64)
                low, high = space.start, counts + space.start - 1
            case _:
                low, high = 0, 1
        declared = np.dtype(space.dtype)
        is_float = declared.kind == "f"
        # float64 would round large integers.
        low, high = (
            np.asarray(bound, np.float64)
            if is_float
            else np.clip(bound, *_limits(np.dtype(np.int64))).astype(np.int64)
            for bound in (low, high)
        )
        stored = declared if declared in COMPACT else np.dtype(np.int64)
        return cls(
            label(name),
            tuple(space.shape or ()),
            np.dtype(number) if is_float else stored,
            declared,
            low,
            high,
        )

    @cached_property
    def bounded(self) -> bool:
        """True if the dtype can hold numbers beyond the bounds."""
        if self.dtype.kind == "f":
            return bool(np.isfinite(self.low).any() or np.isfinite(self.high).any())
        lowest, highest = _limits(self.dtype)
        return bool((self.low > lowest).any() or (self.high < highest).any())

    def read(self, value: Any) -> np.ndarray:
        """Return one element as an array that can be stored without loss.

        Raises:
            InputError: another shape or kind of numbers than the space has.
        """
        array = value if type(value) is np.ndarray else self._array(value)
        if array.shape != self.shape:
            raise InputError(
                f"{self.label}expected an observation of shape {self.shape}, as in its "
                f"space, got {array.shape}"
            )
        if array.dtype != self.declared:
            self._validate_dtype(array)
        return array

    def nearest(self, array: np.ndarray) -> np.ndarray:
        """Return the elements ``(*B, …)`` of the space nearest to an array's."""
        if self.declared.kind != "f" and array.dtype.kind == "f":
            array = array.round()
        return array.clip(self.low, self.high).astype(self.declared)

    def misfits(self, array: np.ndarray) -> np.ndarray:
        """Return which numbers of stored elements are out of bounds, a bool for each.

        NaN does not count as out of bounds here; the rollout refuses it.
        """
        lowest, highest = self._limits
        return (array < lowest) | (array > highest)

    def fits(self, array: np.ndarray) -> bool:
        """Return whether stored elements are all within bounds; a fast test."""
        lowest, highest = self._limits
        if lowest.shape or highest.shape or not array.size:
            return not self.misfits(array).any()
        # Where padding is NaN, neither holds; the rest is not yet known to fit then.
        if array.min() >= lowest and array.max() <= highest:
            return True
        return not self.misfits(array).any()

    def explain(self, index: tuple[int, ...], number: Any) -> str:
        """Return the error for a number, at ``index``, that is out of bounds."""
        low, high = (
            float(np.broadcast_to(bound, self.shape)[index])
            for bound in (self.low, self.high)
        )
        where = f" at {list(index)}" if index else ""
        return (
            f"{self.label}expected numbers in [{low:g}, {high:g}], {self.reason}, "
            f"got {number.item():g}{where}"
        )

    @cached_property
    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        """The bounds in the stored dtype, with room for the rounding of floats."""
        limits = []
        for bound, sign in ((self.low, -1), (self.high, 1)):
            if self.dtype.kind == "f":
                bound = bound + sign * ROUNDING * np.maximum(1, np.abs(bound))
            elif self.dtype.kind != "b":
                bound = bound.clip(*_limits(self.dtype))
            # With one bound for all numbers, `fits` needs no array of bools.
            same = bound.size and (bound == bound.flat[0]).all()
            with np.errstate(over="ignore"):  # beyond the dtype there is no limit
                limits.append((bound.flat[0] if same else bound).astype(self.dtype))
        return limits[0], limits[1]

    def _array(self, value: Any) -> np.ndarray:
        array = as_array(value)
        if array is None or isinstance(value, Mapping):
            raise InputError(
                f"{self.label}expected an array of shape {self.shape}, as in its "
                f"space, got {summary_of(value)}"
            )
        return array

    def _validate_dtype(self, array: np.ndarray) -> None:
        kinds = "biuf" if self.dtype.kind == "f" else "biu"
        if array.dtype.kind not in kinds:
            expected = "numbers" if self.dtype.kind == "f" else "integers"
            raise InputError(
                f"{self.label}expected {expected} ({self.declared}), as in its space, "
                f"got {array.dtype}"
            )
        if self.dtype.kind == "f" or np.can_cast(array.dtype, self.dtype):
            return
        # Storing integers beyond the range of the dtype would change them.
        lowest, highest = _limits(self.dtype)
        wrong = (array < lowest) | (array > highest)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise InputError(self.explain(index, array[index]))


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
