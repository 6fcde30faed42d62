"""The view of a space as the tokens of all plain spaces and lists inside it."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from marl_pool.observations.leaves import Leaf, make_leaf
from marl_pool.observations.lists import (
    ListStorage,
    element_space,
    longest,
    rows_space,
)
from marl_pool.observations.parts import Part, PlainSpace
from marl_pool.observations.slots import Slots
from marl_pool.observations.view import (
    SELF_NAME,
    WHOLE,
    Arrays,
    TokenOptions,
    TokenView,
    listed,
    read_entries,
    validate_indices,
)
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

UNUSED = "unused"
"""Suffix of the name of the part that says which rows of a list are unused."""


class SlotMask(NamedTuple):
    """The part of an observation that says which slots of a set hold tokens."""

    part: str
    absent: bool
    """Its value for a slot without a token."""


class LeavesView(TokenView):
    """The view of a space as the tokens of all plain spaces inside it, the leaves.

    Args:
        space: a space that `validate_space` accepts.
        options: how it becomes tokens.
        number: NumPy dtype in which floats are stored.
        prefix: start of errors about options.
        are_rows: True if no matrix is an image, whatever its bounds are.

    Raises:
        InputError: options that do not fit the space, or types of one name.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        options: TokenOptions,
        number: Any,
        prefix: str,
        *,
        are_rows: bool = False,
    ) -> None:
        self.space = space
        by_path = dict(leaves_of(space))
        masks = _mask_paths(options, by_path, prefix)
        mask_paths = {mask.part for mask in masks.values()}
        sets = {path: leaf for path, leaf in by_path.items() if path not in mask_paths}
        alone = len(sets) == 1
        lists = {path: leaf for path, leaf in sets.items() if element_space(leaf)}
        leaves: dict[str, Leaf] = {
            path: make_leaf(
                leaf,  # type: ignore[arg-type]
                path,
                options,
                number,
                alone=alone,
                are_rows=are_rows,
                prefix=prefix,
            )
            for path, leaf in sets.items()
            if path not in lists
        }
        # Lists take the slots that the other leaves do not.
        used = sum(leaf.num_tokens for leaf in leaves.values())
        self.lists: dict[str, ListStorage] = {}
        for path, leaf in lists.items():
            count = _list_length(path, leaf, options, [*lists], used, prefix)
            positions = tuple(options.positions or ())
            if options.drop == "farthest":
                _validate_distances(path, element_space(leaf), positions, prefix)
            storage = ListStorage.of(leaf, path, count, number, options.drop, positions)
            self.lists[path or WHOLE] = storage
            rows: Any = rows_space(element_space(leaf), count)  # type: ignore[arg-type]
            leaves[path] = make_leaf(
                rows,
                path,
                options,
                number,
                alone=False,
                are_rows=True,
                prefix=prefix,
            )
            masks[path] = SlotMask(f"{path or WHOLE}/{UNUSED}", absent=True)
        # Lists were added last, but tokens follow the order of the space.
        leaves = {path: leaves[path] for path in sets}
        self.leaves = [*leaves.values()]
        self.names = [path or WHOLE for path in leaves]
        self.is_whole = [*leaves] == [""]
        self.masks = {path or WHOLE: mask for path, mask in masks.items()}
        # Bytes are kept if the observation is one image.
        self.dtype = torch.from_numpy(np.zeros(0, number)).dtype
        if alone and self.leaves[0].keeps_bytes:
            self.dtype = torch.uint8
        self.width = max(leaf.num_features for leaf in self.leaves)
        type_names = [name for leaf in self.leaves for name in leaf.type_names]
        # As for choices `lane`, of types lane_0 and lane_1, beside a set `lane_0`.
        ((name, count),) = Counter(type_names).most_common(1)
        is_named = options.token_types is not None and SELF_NAME not in type_names
        if count > 1 and not is_named:
            raise InputError(
                f"{prefix}observation: expected entries whose types have different "
                f"names, got {count} types named {name!r}"
            )
        spec = TokenSpec(
            sum(leaf.num_tokens for leaf in self.leaves),
            self.width,
            tuple(type_names),
            has_self=False,
            dtype="uint8" if self.dtype == torch.uint8 else "float32",
            positions=self.leaves[0].positions if alone else (),
            markers=tuple(pair for leaf in self.leaves for pair in leaf.markers),
        )
        parts = dict(zip(self.names, (leaf.part for leaf in self.leaves), strict=True))
        for path, mask in masks.items():
            shape = (leaves[path].num_tokens,)
            stored = by_path.get(mask.part, spaces.Box(0, 1, shape, np.bool_))  # type: ignore[arg-type]
            if stored.shape != shape:
                raise InputError(
                    f"{prefix}{_key_of(mask)}: expected {mask.part} of shape {shape}, "
                    f"the number of tokens of {path}, got {stored.shape}"
                )
            parts[mask.part] = Part.of(stored, mask.part, number)  # type: ignore[arg-type]
        super().__init__(spec, parts)
        rows = {
            n for n, leaf in zip(self.names, self.leaves, strict=True) if leaf.is_set
        }
        self.sets = frozenset(rows | {mask.part for mask in masks.values()})
        # The observer's type is 0, wherever its entry is in the space.
        if SELF_NAME in spec.type_names:
            self.rename(TokenOptions(token_types=spec.type_names))

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        if self.is_whole:
            values = {WHOLE: observation}
        else:
            values = dict(_values(self.space, observation))
        for name, storage in self.lists.items():
            values[name], values[f"{name}/{UNUSED}"] = storage.read(values[name])
        return values

    @override
    def arbitrary(self, name: str, arrays: Arrays) -> np.ndarray | None:
        if name not in self.lists:
            return None
        unused = arrays[f"{name}/{UNUSED}"]
        return unused[..., None]

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        features, types, padding, first = [], [], [], 0
        for name, leaf in zip(self.names, self.leaves, strict=True):
            values = parts[name]
            added = self.width - leaf.num_features
            features.append(pad(leaf.features(values, self.dtype), (0, added)))
            types.append(leaf.types(values) + first)
            padding.append(leaf.padding(values))
            if name in self.masks:
                part, absent = self.masks[name]
                padding[-1] = padding[-1] | ((parts[part] != 0) == absent)
            first += len(leaf.type_names)
        if first == 1 or len(features) == 1:
            return Tokens(features[0], types[0], padding[0])
        joined = torch.cat(features, -2), torch.cat(types, -1), torch.cat(padding, -1)
        return Tokens(*joined)

    @cached_property
    def slots(self) -> Slots:
        """The slots of all leaves; tokens of equal type names are interchangeable."""
        type_kinds = [*range(self.spec.num_types)]
        for numbers, leaf in self._numbered():
            if leaf.mixes_types:
                mixed = {type_kinds[number] for number in numbers}
                type_kinds = [
                    min(mixed) if kind in mixed else kind for kind in type_kinds
                ]
        slot_kinds: list[int] = []
        optional: list[bool] = []
        for name, (numbers, leaf) in zip(self.names, self._numbered(), strict=True):
            places = [0] * leaf.num_tokens if leaf.mixes_types else leaf.place_types()
            slot_kinds += [type_kinds[numbers[place]] for place in places]
            may_be_absent = leaf.may_be_absent or name in self.masks
            optional += [may_be_absent] * leaf.num_tokens
        return Slots(
            tuple(slot_kinds), tuple(type_kinds), tuple(optional), self.spec.type_names
        )

    @override
    def invert(self, tokens: Tokens) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        start = 0
        for name, (numbers, leaf) in zip(self.names, self._numbered(), strict=True):
            place = slice(start, start := start + leaf.num_tokens)
            types, padding = tokens.types[:, place], tokens.padding[:, place]
            # Leaves count their types from 0, and equal names have one number.
            equal = types[..., None] == torch.tensor(numbers, device=types.device)
            features = tokens.features[:, place, : leaf.num_features]
            leaf_types = equal.int().argmax(-1)
            if leaf.mixes_types:
                # Of several types of one name, keep the row's.
                read = leaf.types(features)
                is_equal = equal.gather(-1, read[..., None])[..., 0]
                leaf_types = torch.where(is_equal, read, leaf_types)
            values[name] = leaf.invert(Tokens(features, leaf_types, padding))
            if name in self.masks:
                part, absent = self.masks[name]
                values[part] = padding if absent else ~padding
        return values

    @override
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        joined: dict[str, Any] = dict(values)
        for name, storage in self.lists.items():
            joined[name] = storage.join(values[name], values[f"{name}/{UNUSED}"])
        return joined[WHOLE] if self.is_whole else _joined(self.space, joined)

    def _numbered(self) -> Iterator[tuple[list[int], Leaf]]:
        """Yield the numbers of each leaf's types after `rename`, and the leaf."""
        count = sum(len(leaf.type_names) for leaf in self.leaves)
        numbers, first = [*(self._renumbered or range(count))], 0
        for leaf in self.leaves:
            yield numbers[first : first + len(leaf.type_names)], leaf
            first += len(leaf.type_names)


def _list_length(
    path: str,
    space: spaces.Space[Any],
    options: TokenOptions,
    lists: list[str],
    used: int,
    prefix: str,
) -> int:
    """Return the number of slots of a list."""
    largest, max_tokens = longest(space), options.max_tokens
    if isinstance(max_tokens, Mapping):
        count = max_tokens.get(path)
    elif max_tokens is not None and len(lists) == 1:
        count = max_tokens - used
    else:
        count = None
    if count is None:
        count = largest
    if count is None:
        among = (
            f"a number for each of {listed(lists)}" if len(lists) > 1 else "a number"
        )
        actual = "null" if max_tokens is None else max_tokens
        raise InputError(
            f"{prefix}max_tokens: expected {among}, since a Sequence may have any "
            f"length, got {actual}"
        )
    if count < 1:
        raise InputError(
            f"{prefix}max_tokens: expected more than {used}, the tokens of the other "
            f"entries, got {max_tokens}"
        )
    return count if largest is None else min(count, largest)


def _validate_distances(
    path: str, element: Any, positions: tuple[int, ...], prefix: str
) -> None:
    """Raise InputError unless elements of a list have a position."""
    if not positions:
        raise InputError(
            f"{prefix}positions: expected features, by which the farthest elements are "
            "dropped, got none"
        )
    if not isinstance(element, spaces.Box | spaces.MultiBinary):
        raise InputError(
            f"{prefix}drop: expected last, since the elements of {path or WHOLE} are "
            "choices without a position, got farthest"
        )
    validate_indices(f"{prefix}positions", positions, int(np.prod(element.shape or ())))


def _mask_paths(
    options: TokenOptions, paths: Collection[str], prefix: str
) -> dict[str, SlotMask]:
    """Return the masks that the options name, by the path of their set."""
    masks: dict[str, SlotMask] = {}
    for key, absent in (("presence_keys", False), ("padding_keys", True)):
        parts = getattr(options, key) or {}
        if parts and "" in paths:
            raise InputError(
                f"{prefix}{key}: expected null, since no entry that could be a mask "
                f"lies beside the only set, got {dict(parts)}"
            )
        for path, part in parts.items():
            for name in (path, part):
                if name not in paths or path in masks or path == part:
                    raise InputError(
                        f"{prefix}{key}: expected each set once, with a mask, among "
                        f"{listed([*paths])}, got {name}"
                    )
            masks[path] = SlotMask(part, absent)
    return masks


def _key_of(mask: SlotMask) -> str:
    return "padding_keys" if mask.absent else "presence_keys"


def entries_of(
    space: spaces.Dict | spaces.Tuple,
) -> list[tuple[Any, spaces.Space[Any]]]:
    """Return the entries of a space by key or index."""
    if isinstance(space, spaces.Dict):
        return [*space.items()]
    return [*enumerate(space.spaces)]


def leaves_of(
    space: spaces.Space[Any], name: str = ""
) -> Iterator[tuple[str, PlainSpace | spaces.Space[Any]]]:
    """Yield the plain spaces and the lists inside a space with their paths."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, entry in entries_of(space):
            yield from leaves_of(entry, f"{name}/{key}" if name else str(key))
    else:
        yield name, space


def _values(
    space: spaces.Space[Any], observation: Any, name: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values in an observation by the paths of `leaves_of`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = entries_of(space)
        keys = [key for key, _ in entries]
        values = read_entries(observation, keys, name)
        for key, entry in entries:
            path = f"{name}/{key}" if name else str(key)
            yield from _values(entry, values[key], path)
    else:
        yield name, observation


def _joined(space: spaces.Space[Any], values: Mapping[str, Any], name: str = "") -> Any:
    """Return the observations with these values by path; the inverse of `_values`."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return values[name]
    entries = {
        key: _joined(entry, values, f"{name}/{key}" if name else str(key))
        for key, entry in entries_of(space)
    }
    return entries if isinstance(space, spaces.Dict) else tuple(entries.values())
