"""The interface by which observations of any space are stored and become tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from marl_pool.observations.masks import MASK, MaskPart, join_masks
from marl_pool.observations.parts import Part, label
from marl_pool.observations.slots import Slots
from marl_pool.options.signatures import check_argument
from marl_pool.options.types import Extent, NonNegativeInt, Size
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

WHOLE = "observation"
"""Name of the part of an observation that is one array."""
SELF_NAME = "self"
"""Name of the type of the observer's own tokens, which is type 0."""
Arrays = Mapping[str, np.ndarray]
"""Arrays ``(*B, …)`` by the names of parts."""
Range = tuple[int, int] | Mapping[str, int]
"""Range of a vector: start and stop, or start, count and features."""
Slices = Mapping[str, Range]
"""Ranges of a vector by name; see `TokenOptions`."""


@dataclass(frozen=True)
class TokenOptions:
    """Choices about tokens that the space of an observation leaves open.

    Args:
        padding: ``"zero_rows"`` if rows of zeros are not tokens; None if all rows are.
        presence: index of the feature that is 0 in rows that are not tokens; if only
            some of several matrices have one, by the names of their types.
        presence_keys: by the path of a set in a Dict, the path of the entry ``(N,)``
            that is 1 where there is a token and 0 where there is none.
        padding_keys: the same for entries that are 1 where there is no token.
        slices: named ranges of a vector: ``[start, stop]`` is one token, ``{"start": 4,
            "count": 10, "features": 5}`` ten of five features; with ``"presence": 0``
            those whose first feature is 0 are not tokens. Ranges do not overlap, and
            numbers outside of them are not observed.
        type_features: indices of a row's features the largest of which gives its type.
        patch: height and width of an image's patches in pixels; None for the smallest
            that give no more than 64 tokens.
        channels: axis of an image's channels.
        token_types: a name for each type, in their order, or for each row. Equal names
            make one type, and ``self`` names the observer's own tokens.
        signal_types: names of the types that matter for the task; see `TokenSpec`.
        positions: indices of the features that hold a token's position.
        max_tokens: number of slots that tokens are padded to, or None for as many as
            the space has. A ``Sequence`` needs it, and takes the slots that other
            entries leave; for several, numbers by their paths.
        drop: which elements of a longer ``Sequence`` are left out: the ``"last"`` ones
            or the ``"farthest"``, by the norm of the features in ``positions``; None to
            refuse it.

    Raises:
        InputError: a value of another type, or out of range.
    """

    padding: Literal["zero_rows"] | None = None
    presence: NonNegativeInt | Mapping[str, NonNegativeInt] | None = None
    presence_keys: Mapping[str, str] | None = None
    padding_keys: Mapping[str, str] | None = None
    slices: Slices | None = None
    type_features: Sequence[int] | None = None
    patch: Size | None = None
    channels: Literal["first", "last"] = "last"
    token_types: Sequence[str] | None = None
    signal_types: Sequence[str] | None = None
    positions: Sequence[Extent] | None = None
    max_tokens: Size | Mapping[str, Size] | None = None
    drop: Literal["last", "farthest"] | None = None

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        # `read_slices` checks the ranges, and names the one that is wrong.
        hints["slices"] = Mapping[str, Any] | None
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not item.default:
                check_argument(item.name, value, hints[item.name])


class Misfit(NamedTuple):
    """A number of a stored observation that its space does not contain."""

    place: tuple[int, ...]
    """Index of the observation in the batch."""
    message: str


class TokenView(ABC):
    """Observations of one space: stored in arrays, checked, and converted to tokens.

    A caller allocates an array ``(*B, *shape)`` for each of the `parts`, stores each
    observation by `write`, checks all of them at once by `misfit`, and converts tensors
    of the same shapes by `tokens`::

        view = make_view(space)
        arrays = view.arrays(num_envs)
        view.write(arrays, 0, observation)
        tokens = view.tokens({k: torch.from_numpy(v) for k, v in arrays.items()})

    `observations` is the inverse, even for tokens that a perturbation changed.

    Args:
        spec: sizes and type names of the tokens.
        parts: storage of an observation by name.
    """

    def __init__(self, spec: TokenSpec, parts: Mapping[str, Part]) -> None:
        self.spec, self.parts = spec, dict(parts)
        self.shows_tokens = False
        """True if the observations are already Dicts of tokens."""
        self.takes_any_number = False
        """True if `tokens` converts any number of tokens."""
        self.sets: frozenset[str] = frozenset()
        """Parts whose first dimension runs over tokens of one kind."""
        self._renumbered: tuple[int, ...] | None = None
        """Number of each type after `rename`."""

    def arrays(self, *batch: int) -> dict[str, np.ndarray]:
        """Return arrays of zeros for observations of batch dimensions ``batch``."""
        return {
            name: np.zeros((*batch, *part.shape), part.dtype)
            for name, part in self.parts.items()
        }

    @abstractmethod
    def read(self, observation: Any) -> Mapping[str, Any]:
        """Return the values of all `parts` in an observation.

        Raises:
            InputError: an observation that lacks a part, or of another kind.
        """

    def write(self, arrays: Arrays, index: Any, observation: Any) -> None:
        """Store an observation at ``index`` of the batch, if its shape and dtype fit.

        Raises:
            InputError: another shape or dtype than the space has, or no such part.
        """
        values = self.read(observation)
        for name, part in self.parts.items():
            arrays[name][index] = part.read(values[name])

    def misfit(self, arrays: Arrays, present: np.ndarray) -> Misfit | None:
        """Return the first stored number beyond the bounds of its space.

        Args:
            arrays: as for `write`.
            present: ``(*B)`` bool, observations that were written.
        """
        for name, part in self.parts.items():
            if not part.bounded or part.fits(arrays[name]):
                continue
            # `fits` is faster, and nearly always true.
            wrong = part.misfits(arrays[name])
            padded = self.arbitrary(name, arrays)
            where = present.reshape(*present.shape, *[1] * len(part.shape))
            wrong = wrong & where if padded is None else wrong & where & ~padded
            if wrong.any():
                first = tuple(int(i) for i in np.argwhere(wrong)[0])
                batch, index = first[: present.ndim], first[present.ndim :]
                return Misfit(batch, part.explain(index, arrays[name][first]))
        return None

    def arbitrary(self, name: str, arrays: Arrays) -> np.ndarray | None:
        """Return where the numbers of a part may be anything; None for nowhere."""
        return None

    @abstractmethod
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        """Convert stored observations to tokens, with types as before `rename`."""

    def tokens(self, parts: Mapping[str, Tensor]) -> Tokens:
        """Convert stored observations ``(*B, …)`` by part to tokens ``(*B, N, …)``."""
        tokens = self.convert(parts)
        if self._renumbered is None:
            return tokens
        numbers = torch.tensor(self._renumbered, device=tokens.types.device)
        # Types under padding may be any number.
        types = tokens.types.clamp(0, len(self._renumbered) - 1)
        return tokens._replace(types=numbers[types])

    @property
    @abstractmethod
    def slots(self) -> Slots:
        """The slots that tokens return to, each with the tokens that it can hold.

        Raises:
            InputError: tokens that cannot become observations again.
        """

    @abstractmethod
    def invert(self, tokens: Tokens) -> dict[str, Tensor]:
        """Convert tokens in their `slots` ``(B, N, …)`` to values ``(B, …)`` by part.

        The values need not fit the bounds and the dtype of the space.
        """

    @abstractmethod
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        """Return the observations ``(B, …)`` of values by part; inverse of `read`."""

    def observations(self, tokens: Tokens) -> Any:
        """Convert tokens to observations of the space; the inverse of `tokens`.

        Numbers are rounded if the space has integers, and clipped to its bounds. A
        choice is the index of its largest feature. Where a token is missing, its
        numbers are 0, and its presence says so.

        Args:
            tokens: of a batch ``(B,)``, perhaps in another order, hidden or added.

        Returns:
            Observations as ``gymnasium.vector`` batches them: an array, or a dict or
            tuple of arrays ``(B, …)``; of lists a tuple.

        Raises:
            UnfitTokensError: tokens that the space cannot hold, or cannot say to be
                absent.
            InputError: tokens that cannot become observations again.
        """
        values = self.invert(self.slots.fill(tokens))
        if MASK in self.parts and tokens.action_mask is not None:
            values[MASK] = tokens.action_mask
        return self.join(
            {
                name: self.parts[name].nearest(value.cpu().numpy())
                for name, value in values.items()
            }
        )

    def rename(self, options: TokenOptions, prefix: str = "") -> None:
        """Apply the names of types, the signal types and the positions of ``options``.

        Raises:
            InputError: a wrong number of names, or names or features that the tokens
                lack; the message starts with ``prefix`` and the option.
        """
        spec = self.spec
        if options.token_types is not None:
            type_names = list(options.token_types)
            if len(type_names) != spec.num_types or not all(type_names):
                raise InputError(
                    f"{prefix}token_types: expected {_count(spec.num_types, 'name')}, "
                    f"for {listed(spec.type_names)}, got {listed(type_names) or 'none'}"
                )
            # The observer's own type is number 0; the others keep their order.
            names = sorted(
                dict.fromkeys(type_names), key=lambda name: name != SELF_NAME
            )
            self._renumbered = tuple(names.index(name) for name in type_names)
            spec = replace(
                spec,
                type_names=tuple(names),
                has_self=SELF_NAME in names,
                signal_types=tuple(
                    dict.fromkeys(
                        type_names[spec.type_names.index(name)]
                        for name in spec.signal_types
                    )
                ),
                markers=tuple(
                    (type_names[spec.type_names.index(name)], index)
                    for name, index in spec.markers
                ),
            )
        if options.signal_types is not None:
            signal = tuple(dict.fromkeys(options.signal_types))
            if not signal or not set(signal) <= set(spec.type_names):
                raise InputError(
                    f"{prefix}signal_types: expected some of "
                    f"{listed(spec.type_names)}, got {listed(signal) or 'none'}"
                )
            spec = replace(spec, signal_types=signal)
        if options.positions is not None:
            positions = tuple(options.positions)
            validate_indices(f"{prefix}positions", positions, spec.num_features)
            spec = replace(spec, positions=positions)
        self.spec = spec


class WrapperView(TokenView):
    """A view that delegates to another one, except for what a subclass overrides.

    Args:
        inner: the other view.
        spec: as for `TokenView`.
        parts: as for `TokenView`.
    """

    def __init__(
        self, inner: TokenView, spec: TokenSpec, parts: Mapping[str, Part]
    ) -> None:
        super().__init__(spec, parts)
        self.inner, self.sets = inner, inner.sets

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        return self.inner.read(observation)

    @override
    def arbitrary(self, name: str, arrays: Arrays) -> np.ndarray | None:
        return self.inner.arbitrary(name, arrays) if name in self.inner.parts else None

    @property
    @override
    def slots(self) -> Slots:
        return self.inner.slots

    @override
    def invert(self, tokens: Tokens) -> dict[str, Tensor]:
        return self.inner.invert(tokens)

    @override
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        return self.inner.join(values)


class EntryView(WrapperView):
    """The view of one entry of a Dict or Tuple, or of all but its action mask.

    Args:
        entry: view of the entry.
        key: key or index of the entry; None for the whole Dict without the mask.
        mask: storage of the mask; None without one.
        in_tuple: True if the entry belongs to a Tuple.
    """

    def __init__(
        self, entry: TokenView, key: Any, mask: MaskPart | None, *, in_tuple: bool
    ) -> None:
        masks = {} if mask is None else {MASK: mask.part}
        super().__init__(entry, entry.spec, {**entry.parts, **masks})
        self.key, self.mask, self.in_tuple = key, mask, in_tuple
        self.shows_tokens = key is None and entry.shows_tokens
        self.takes_any_number = entry.takes_any_number

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        if self.mask is None:
            return self.inner.read(read_entries(observation, [self.key])[self.key])
        if not isinstance(observation, Mapping) or MASK not in observation:
            raise _missing(MASK, "")
        observed = {key: part for key, part in observation.items() if key != MASK}
        if self.key is not None:
            observed = read_entries(observed, [self.key])[self.key]
        mask = join_masks(observation[MASK], self.mask.sizes)
        return {**self.inner.read(observed), MASK: mask}

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        tokens = self.inner.tokens(parts)
        return tokens if self.mask is None else with_action_mask(tokens, parts[MASK])

    @override
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        entries = self.inner.join(values)
        if self.key is not None:
            entries = (entries,) if self.in_tuple else {self.key: entries}
        if self.mask is not None and MASK in values:
            entries = {**entries, MASK: self.mask.split(values[MASK])}
        return entries


class PaddedView(WrapperView):
    """A view with additional slots, all of them padding.

    Args:
        inner: view of the tokens.
        max_tokens: number of slots, at least as many as ``inner`` has.
    """

    def __init__(self, inner: TokenView, max_tokens: int) -> None:
        spec = replace(inner.spec, num_tokens=max_tokens)
        super().__init__(inner, spec, inner.parts)

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        tokens = self.inner.tokens(parts)
        added = self.spec.num_tokens - tokens.num_tokens
        return tokens._replace(
            features=pad(tokens.features, (0, 0, 0, added)),
            types=pad(tokens.types, (0, added)),
            padding=pad(tokens.padding, (0, added), value=True),
        )


def read_entries(
    observation: Any, keys: Sequence[Any], name: str = ""
) -> Mapping[Any, Any]:
    """Return the entries of a Dict's or a Tuple's observation.

    A dict may have other entries, which are not observed.

    Args:
        observation: a mapping, or a sequence if the keys are its indices.
        keys: keys or indices of the space, in its order.
        name: path of the observation, for errors.

    Raises:
        InputError: a missing entry, or too many of a Tuple.
    """
    entries = observation
    if type(entries) is not dict and not isinstance(entries, Mapping):
        if not isinstance(entries, tuple | list) or not isinstance(keys[0], int):
            expected = f"a dict of {listed(keys)}" if keys[0] != 0 else "a tuple"
            raise InputError(
                f"{label(name)}expected {expected}, as in its space, got "
                f"{type(observation).__name__}"
            )
        if len(entries) > len(keys):
            raise InputError(
                f"{label(name)}expected {len(keys)} entries, as in its space, got "
                f"{len(entries)}"
            )
        entries = dict(enumerate(entries))
    for key in keys:
        if key not in entries:
            raise _missing(f"{name}/{key}" if name else str(key), listed(keys))
    return entries


def _missing(name: str, listed_keys: str) -> InputError:
    among = f" of {listed_keys}" if listed_keys else ""
    return InputError(f"{label(name)}expected one{among}, as in its space, got none")


def with_action_mask(tokens: Tokens, mask: Tensor) -> Tokens:
    """Add a mask of allowed options ``(*B, L)``, numbers 0 and 1, to tokens.

    This is the only place where an observation's mask is passed on.
    """
    return tokens._replace(action_mask=mask.bool())


def validate_indices(key: str, indices: Sequence[int], size: int) -> None:
    """Raise InputError unless the indices differ and exist among the features."""
    if len(set(indices)) < len(indices) or not set(indices) <= set(range(size)):
        raise InputError(
            f"{key}: expected different indices of features below {size}, "
            f"got {list(indices)}"
        )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def listed(names: Sequence[Any]) -> str:
    """Return names in one line of bounded length."""
    first = ", ".join(map(str, names[:8]))
    return f"{first}, … ({len(names)})" if len(names) > 8 else first
