"""Lists, Gymnasium's ``Sequence`` and RLlib's ``Repeated``, as padded rows."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from gymnasium import spaces

from marl_pool.observations.parts import Part, PlainSpace, label
from marl_pool.utils.errors import InputError


def element_space(space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of a list's elements; None if the space has no lists.

    RLlib's class is recognized by its attributes, so that ray need not be imported.
    """
    if isinstance(space, spaces.Sequence):
        return space.feature_space
    return space.child_space if hasattr(space, "max_len") else None  # type: ignore[attr-defined]


def longest(space: spaces.Space[Any]) -> int | None:
    """Return the largest length of a list; None if the space sets no limit."""
    return getattr(space, "max_len", None)


def becomes_rows(space: spaces.Space[Any]) -> bool:
    """Return whether the elements of a list can be rows of a matrix."""
    element = element_space(space)
    shape = element.shape or () if isinstance(element, PlainSpace) else (0,)
    return len(shape) < 2 and 0 not in shape


def rows_space(element: PlainSpace, count: int) -> PlainSpace:
    """Return the space of ``count`` elements, each a row of a matrix."""
    shape = (count, *(element.shape or (1,)))
    match element:
        case spaces.Box():
            dtype: Any = element.dtype
            low, high = (
                np.broadcast_to(bound, shape) for bound in (element.low, element.high)
            )
            return spaces.Box(low, high, shape, dtype)
        case spaces.MultiBinary():
            return spaces.MultiBinary(shape)
        case spaces.Discrete():
            return spaces.MultiDiscrete(
                np.full(shape, element.n), start=np.full(shape, element.start)
            )
        case _:
            counts, start = (
                np.tile(numbers, (count, 1))
                for numbers in (element.nvec, element.start)
            )
            return spaces.MultiDiscrete(counts, start=start)


@dataclass(frozen=True)
class ListStorage:
    """Storage of a list in rows of a matrix, of which the last ones may be unused."""

    name: str
    """Path of the list, empty for the whole observation."""
    space: spaces.Space[Any]
    element: Part
    rows: Part
    drop: Literal["last", "farthest"] | None
    """Which elements are dropped if there are more than rows; None to refuse them."""
    positions: tuple[int, ...]
    """Indices of the features by which the farthest elements are found."""

    @classmethod
    def of(
        cls,
        space: spaces.Space[Any],
        name: str,
        count: int,
        number: Any,
        drop: Literal["last", "farthest"] | None,
        positions: tuple[int, ...],
    ) -> Self:
        """Describe the storage of lists of up to ``count`` elements."""
        element: Any = element_space(space)
        stored = Part.of(rows_space(element, count), name, number)
        return cls(name, space, Part.of(element, name, number), stored, drop, positions)

    def read(self, observation: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a list, and which of them are unused.

        Raises:
            InputError: no list, an element of another shape, or too many elements.
        """
        try:
            elements = [self.element.read(element) for element in observation]
        except TypeError as error:
            raise InputError(
                f"{label(self.name)}expected a list, as in its space, got "
                f"{type(observation).__name__}"
            ) from error
        count = self.rows.shape[0]
        if len(elements) > count:
            elements = self._shortened(elements, count)
        # So that the original numbers are checked: integers would wrap around, and
        # floats are rounded only after it.
        has_integers = self.rows.declared.kind in "iu"
        dtype = self.rows.dtype if has_integers else self.rows.declared
        rows = np.zeros(self.rows.shape, dtype)
        if elements:
            rows[: len(elements)] = np.stack(elements).reshape(-1, *rows.shape[1:])
        return rows, np.arange(count) >= len(elements)

    def join(self, rows: np.ndarray, unused: np.ndarray) -> tuple[Any, ...]:
        """Return a list for each matrix of rows ``(B, N, F)``."""
        lists = []
        for matrix, padding in zip(rows, unused, strict=True):
            elements = matrix[~padding].reshape(-1, *self.element.shape)
            is_stacked = isinstance(self.space, spaces.Sequence) and self.space.stack
            lists.append(elements if is_stacked else self._listed(elements))
        return tuple(lists)

    def _listed(self, elements: np.ndarray) -> Any:
        return tuple(elements) if longest(self.space) is None else [*elements]

    def _shortened(self, elements: list[np.ndarray], count: int) -> list[np.ndarray]:
        if self.drop is None:
            raise InputError(
                f"{label(self.name)}expected at most {count} elements, the number of "
                f"slots, got {len(elements)}; max_tokens makes more of them, and drop "
                "says which elements are left out"
            )
        if self.drop == "last":
            return elements[:count]
        distances = [
            np.linalg.norm(item.ravel()[[*self.positions]]) for item in elements
        ]
        # The elements that remain keep their order.
        nearest = np.sort(np.argsort(distances, kind="stable")[:count])
        return [elements[index] for index in nearest]
