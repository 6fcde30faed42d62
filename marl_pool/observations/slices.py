"""Vectors cut into named parts."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.observations.parts import Part
from marl_pool.observations.view import WHOLE, Range, Slices, TokenView, WrapperView
from marl_pool.options.signatures import check_argument, unknown_key
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class Slice:
    """A range of a vector's numbers: one token, or rows of equal length."""

    start: int
    stop: int
    shape: tuple[int, ...]
    """``(F,)`` for one token, or ``(N, F)``."""
    presence: int | None = None
    """Index of the number that is 0 in rows that are not tokens."""

    @property
    def index(self) -> slice:
        """Index of the numbers."""
        return slice(self.start, self.stop)


def read_slices(slices: Slices, size: int, prefix: str) -> dict[str, Slice]:
    """Check the slices of a vector.

    Args:
        slices: as in `TokenOptions`.
        size: number of the vector's numbers.
        prefix: start of errors.

    Raises:
        InputError: no slice, one that is not a range, a range outside the vector,
            ranges that overlap, or an unknown key.
    """
    if not slices:
        raise InputError(f"{prefix}slices: expected at least one, got none")
    parts = {
        name: _read_slice(f"{prefix}slices.{name}", value, size)
        for name, value in slices.items()
    }
    in_order = sorted(parts.items(), key=lambda item: item[1].start)
    for (name, part), (next_name, next_part) in itertools.pairwise(in_order):
        if next_part.start < part.stop:
            raise InputError(
                f"{prefix}slices.{next_name}: expected a range from {part.stop}, after "
                f"{name}'s, got {next_part.start} to {next_part.stop}"
            )
    return parts


def _read_slice(key: str, value: Any, size: int) -> Slice:
    for name, number in value.items() if isinstance(value, Mapping) else ():
        if name not in KEYS:
            raise unknown_key(f"{key}.{name}", KEYS)
        check_argument(f"{key}.{name}", number, int)
    if not isinstance(value, Mapping):
        check_argument(key, value, Range)
        start, stop = value
        part = Slice(start, stop, (stop - start,))
    elif {"start", "count", "features"} <= value.keys():
        start, shape = value["start"], (value["count"], value["features"])
        stop = start + shape[0] * shape[1]
        part = Slice(start, stop, shape, value.get("presence"))
    else:
        raise InputError(
            f"{key}: expected [start, stop] or a mapping of start, count, features and "
            f"optionally presence, got {dict(value)}"
        )
    if not 0 <= part.start < part.stop <= size or min(part.shape) < 1:
        raise InputError(
            f"{key}: expected a range within the {size} numbers of the observation, "
            f"got {part.start} to {part.stop}"
        )
    return part


KEYS = frozenset(("start", "count", "features", "presence"))
"""Keys of a slice of several rows."""


def sliced_space(
    space: spaces.Box | spaces.MultiBinary, slices: Mapping[str, Slice]
) -> spaces.Dict:
    """Return the space of the named parts of a vector."""
    entries: dict[str, spaces.Space[Any]] = {}
    for name, part in slices.items():
        if isinstance(space, spaces.MultiBinary):
            entries[name] = spaces.MultiBinary(part.shape)
            continue
        dtype: Any = space.dtype
        low, high = (
            bound[part.index].reshape(part.shape) for bound in (space.low, space.high)
        )
        entries[name] = spaces.Box(low, high, part.shape, dtype)
    return spaces.Dict(entries)


class SlicedView(WrapperView):
    """The view of a vector, by a view of its named parts.

    Args:
        space: of the vectors.
        inner: view of `sliced_space`.
        slices: by name.
        number: NumPy dtype in which floats are stored.
    """

    def __init__(
        self,
        space: spaces.Box | spaces.MultiBinary,
        inner: TokenView,
        slices: Mapping[str, Slice],
        number: Any,
    ) -> None:
        super().__init__(inner, inner.spec, {WHOLE: Part.of(space, "", number)})
        self.slices, self.sets = dict(slices), frozenset()

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        return {WHOLE: observation}

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        values = parts[WHOLE]
        return self.inner.tokens(
            {
                name: values[..., part.index].unflatten(-1, part.shape)
                for name, part in self.slices.items()
            }
        )

    @override
    def invert(self, tokens: Tokens) -> dict[str, Tensor]:
        # Tokens lack the numbers outside of all slices, and cannot give them back.
        covered = np.zeros(self.parts[WHOLE].shape, np.bool_)
        for part in self.slices.values():
            covered[part.index] = True
        if not covered.all():
            raise InputError(
                "slices: expected every number of the observation in a slice, since "
                "tokens become observations again, got none for number "
                f"{int(np.argmin(covered))}"
            )
        values = tokens.features.new_zeros(len(tokens.types), len(covered))
        inner_values = self.inner.invert(tokens)
        for name, part in self.slices.items():
            values[:, part.index] = inner_values[name].flatten(1).to(values.dtype)
        return {WHOLE: values}

    @override
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        return values[WHOLE]
