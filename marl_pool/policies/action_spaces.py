"""Gymnasium's action spaces, and their actions as rows of numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_pool.utils.errors import InputError
from marl_pool.utils.text import single_line


class Selection(spaces.Discrete):
    """A choice between fixed options and the tokens of an agent's observation.

    Option i below ``num_fixed`` is a fixed one, such as staying in place. Option
    ``num_fixed + i`` selects the token in slot i. Only present tokens of the types in
    ``selects`` are meant to be selected: policies with ``policy.action=select`` never
    choose others, and other policies follow the environment's action mask, if any. To
    Gymnasium it is a Discrete.

    Where a perturbation moves tokens, an agent selects among the slots that it
    perceives, and the environment receives the slot of the same entity.

    Args:
        num_fixed: number of fixed options, at least 1, for an agent that sees nothing
            to select.
        num_tokens: N of the agent's `TokenSpec`.
        selects: names of the types of tokens that can be selected.
        seed: of the space's own random numbers.

    Raises:
        InputError: no fixed option, no token or no type.
    """

    def __init__(
        self,
        num_fixed: int,
        num_tokens: int,
        selects: Sequence[str],
        seed: int | None = None,
    ) -> None:
        for name, size in (("num_fixed", num_fixed), ("num_tokens", num_tokens)):
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                raise InputError(
                    f"Selection.{name}: expected an integer of at least 1, got {size!r}"
                )
        # A string would pass as a sequence of letters.
        if not selects or isinstance(selects, str):
            raise InputError(
                f"Selection.selects: expected names of types, got {selects!r}"
            )
        super().__init__(int(num_fixed + num_tokens), seed=seed)
        self.num_fixed, self.selects = int(num_fixed), tuple(selects)

    def __repr__(self) -> str:
        """Return the constructor's call."""
        num_tokens = int(self.n) - self.num_fixed
        return f"Selection({self.num_fixed}, {num_tokens}, {self.selects})"

    def __eq__(self, other: object) -> bool:
        """Return True for a space of the same options."""
        return (
            isinstance(other, Selection)
            and super().__eq__(other)
            and (self.num_fixed, self.selects) == (other.num_fixed, other.selects)
        )


@dataclass(frozen=True)
class _PlainSpace:
    """A plain space inside an action space, and its numbers in a row."""

    space: spaces.Space[Any]
    path: tuple[Any, ...]
    """Keys and indices of the space inside Dicts and Tuples."""
    sizes: tuple[int, ...]
    """Number of options of each entry; () for a Box."""
    start: np.ndarray
    """Number of the first option of each entry."""
    low: tuple[float, ...]
    """Bounds of a Box; () for choices."""
    high: tuple[float, ...]

    def has_choices(self, values: np.ndarray) -> bool:
        """Return True for integers of the space; Gymnasium accepts some floats."""
        kinds = "iub" if isinstance(self.space, spaces.MultiBinary) else "iu"
        if values.dtype.kind not in kinds or values.shape != self.start.shape:
            return False
        choices = (values.astype(np.int64) - self.start).ravel()
        return bool(((choices >= 0) & (choices < np.array(self.sizes))).all())


class ActionRows:
    """Actions of a space as rows of numbers, and back.

    A row has the number of each choice, counted from 0, in the order of the space, and
    then the numbers of all Boxes. The row of a Discrete is only its choice, ``()``;
    others are ``(A,)``. Policies choose rows, and `BatchedEnv.step` takes them::

        rows = ActionRows(spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3))))
        rows.flatten(([0.5, -1.0], 2))  # [2.0, 0.5, -1.0]
        rows.restore(np.array([2.0, 0.5, -1.0]))  # (array([0.5, -1.0]), 2)

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, a bounded Box of one dimension, or
            a Tuple or Dict of them.

    Attributes:
        sizes: number of options of each choice.
        low: lower bounds of the numbers of all Boxes. ``high``: the upper.
        is_scalar: True for a Discrete.
        counts_from_zero: True if the space itself counts all choices from 0.
        has_float_boxes: True if all Boxes hold floats.

    Raises:
        InputError: another space.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self._plain_spaces = list(_plain_spaces(space))
        if not self._plain_spaces:
            raise _refusal(space)
        self.is_scalar = isinstance(space, spaces.Discrete)
        self.sizes = tuple(size for leaf in self._plain_spaces for size in leaf.sizes)
        self.low = tuple(number for leaf in self._plain_spaces for number in leaf.low)
        self.high = tuple(number for leaf in self._plain_spaces for number in leaf.high)
        boxes = [leaf.space for leaf in self._plain_spaces if not leaf.sizes]
        self.has_float_boxes = all(box.dtype.kind == "f" for box in boxes)  # type: ignore[union-attr]
        self.counts_from_zero = not any(leaf.start.any() for leaf in self._plain_spaces)

    def flatten(self, action: Any) -> np.ndarray:
        """Return the row of an action: int64, or float64 if the space has a Box.

        Raises:
            InputError: an action of another form, a choice that the space lacks, or
                numbers that are not finite. Numbers may exceed the bounds of a Box.
        """
        choices, numbers = [], []
        for leaf in self._plain_spaces:
            try:
                values = np.asarray(_entry(action, leaf.path))
            # A user's policy may return anything.
            except (LookupError, TypeError, ValueError) as error:
                raise self._misfit(action) from error
            if leaf.sizes:
                if not leaf.has_choices(values):
                    raise self._misfit(action)
                choices.append((values.astype(np.int64) - leaf.start).ravel())
            else:
                shaped = values.shape == leaf.space.shape
                real = values.dtype.kind in "biuf"
                if not (shaped and real and np.isfinite(values).all()):
                    raise self._misfit(action)
                numbers.append(values)
        row = np.concatenate([*choices, *numbers])
        # float64 holds both large choices and float32 numbers exactly.
        row = row.astype(np.float64 if numbers else np.int64)
        return row[0] if self.is_scalar else row

    def restore(self, row: np.ndarray) -> Any:
        """Return the action of a row, in the dtypes of the space."""
        # The row of a Discrete has no dimension.
        flat = np.reshape(row, -1)
        first, number = 0, len(self.sizes)
        values = {}
        for leaf in self._plain_spaces:
            space, count = leaf.space, len(leaf.sizes)
            if count:
                choices = flat[first : first + count].astype(np.int64)
                choices = choices.reshape(leaf.start.shape) + leaf.start
                first += count
                is_one = isinstance(space, spaces.Discrete)
                values[leaf.path] = (
                    int(choices) if is_one else choices.astype(space.dtype)
                )
            else:
                count = len(leaf.low)
                values[leaf.path] = flat[number : number + count].astype(space.dtype)
                number += count
        return _assemble(self.space, values)

    def _misfit(self, action: Any) -> InputError:
        # Errors are one line, unlike the text of arrays.
        expected, actual = map(single_line, (self.space, action))
        return InputError(f"expected {expected}, got {actual:.200}")


def _plain_spaces(space: Any, path: tuple[Any, ...] = ()) -> Iterator[_PlainSpace]:
    """Yield the plain spaces inside a space."""
    none: tuple[float, ...] = ()
    match space:
        case spaces.Tuple():
            for index, subspace in enumerate(space.spaces):
                yield from _plain_spaces(subspace, (*path, index))
        case spaces.Dict():
            for key, subspace in space.items():
                yield from _plain_spaces(subspace, (*path, key))
        case spaces.Discrete():
            yield _PlainSpace(
                space, path, (int(space.n),), np.array(space.start), none, none
            )
        case spaces.MultiDiscrete() if space.nvec.size:
            sizes = tuple(map(int, space.nvec.flat))
            yield _PlainSpace(space, path, sizes, np.asarray(space.start), none, none)
        case spaces.MultiBinary():
            sizes = (2,) * int(np.prod(space.shape))
            start = np.zeros(space.shape, np.int64)
            yield _PlainSpace(space, path, sizes, start, none, none)
        case spaces.Box() if (
            len(space.shape) == 1 and space.shape[0] and _is_bounded(space)
        ):
            low, high = (tuple(b.tolist()) for b in (space.low, space.high))
            yield _PlainSpace(space, path, (), np.zeros(0, np.int64), low, high)
        case _:
            raise _refusal(space)


def _is_bounded(space: spaces.Box) -> bool:
    """Return True if policies can scale [-1, 1] to the bounds, in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return bool(np.isfinite([low, high, high - low]).all())


def _refusal(space: Any) -> InputError:
    return InputError(
        "action space: expected Discrete(n), MultiDiscrete, MultiBinary, a bounded Box "
        "of one dimension, or a Tuple or Dict of them, got "
        f"{' '.join(str(space).split())}"
    )


def _entry(action: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        action = action[key]
    return action


def _assemble(
    space: Any, values: dict[tuple[Any, ...], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return the values of plain spaces, by path, in the form of a space."""
    match space:
        case spaces.Tuple():
            parts = enumerate(space.spaces)
            return tuple(
                _assemble(subspace, values, (*path, i)) for i, subspace in parts
            )
        case spaces.Dict():
            return {
                key: _assemble(subspace, values, (*path, key))
                for key, subspace in space.items()
            }
    return values[path]
