"""From a Gymnasium space to its view as tokens."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces

from marl_pool.observations.leaves import MOST_OPTIONS, ImageLeaf, RowsLeaf
from marl_pool.observations.leaves_view import LeavesView, entries_of, leaves_of
from marl_pool.observations.lists import becomes_rows, element_space
from marl_pool.observations.masks import MASK, MaskPart, mask_sizes
from marl_pool.observations.slices import Slice, SlicedView, read_slices, sliced_space
from marl_pool.observations.token_dict import TOKEN_PARTS, TokenDictView, token_spec
from marl_pool.observations.view import (
    EntryView,
    PaddedView,
    TokenOptions,
    TokenView,
    listed,
)
from marl_pool.options.signatures import check_instance, show
from marl_pool.utils.errors import InputError

VectorView = Callable[[spaces.Box | spaces.MultiBinary], TokenView]
"""Makes the view of an observation that is a vector."""


def make_view(
    space: spaces.Space[Any],
    options: TokenOptions = TokenOptions(),  # noqa: B008, it is frozen
    *,
    number: Any = np.float32,
    vector: VectorView | None = None,
    where: str = "observation space",
    prefix: str = "",
) -> TokenView:
    """Return the view of a space's observations as tokens.

    - A Dict of ``features``, ``types`` and ``padding`` already holds tokens.
    - A matrix, a Box or MultiBinary of ``(N, F)``, is N tokens.
    - An image, a Box or MultiBinary of ``(H, W, C)``, a Box of ``(H, W)`` bytes up to
      255, or any ``(H, W)`` if there is a ``patch``, is cut into patches with their
      places.
    - A Discrete is a one-hot token; a MultiDiscrete is one for each number, or row.
    - A vector is a token for each number, the parts of its ``slices``, or what
      ``vector`` makes of it.
    - A Dict or Tuple is the tokens of all entries, padded with zeros to the same width.
      Types are named by the path of keys; an entry ``self`` is the observer's own. A
      vector in it is one token.
    - A Sequence, or a list space of RLlib, has a token for each element, and padding.

    The entry ``action_mask`` of a Dict says which actions are valid; it is stored as a
    part beside the observation, and is not a token. A Dict or Tuple of one other entry
    counts as that entry.

    Args:
        space: of the observations.
        options: how they become tokens.
        number: NumPy dtype in which floats are stored.
        vector: makes the view of an observation that is a vector.
        where: start of the error about a space that cannot become tokens.
        prefix: start of errors about options.

    Raises:
        InputError: a space that cannot become tokens, or options that do not fit it.
    """
    validate_space(space, where)
    check_instance("options", options, TokenOptions)
    # Unwrap an action mask, and a Dict or Tuple around one entry.
    observed, mask = split_action_mask(space)
    key = _only_key(observed)
    entry = observed if key is None else dict(entries_of(observed))[key]  # type: ignore[arg-type]
    if entry is not space:
        stored = None if mask is None else MaskPart.of(mask, number)
        inner = make_view(
            entry, options, number=number, vector=vector, where=where, prefix=prefix
        )
        return EntryView(
            inner, key, stored, in_tuple=isinstance(observed, spaces.Tuple)
        )
    _validate_token_names(space, options, where)
    slices: dict[str, Slice] = {}
    if token_spec(space) is not None:
        view: TokenView = TokenDictView(space, number)
    elif is_vector(space) and options.slices is not None:
        slices = read_slices(options.slices, space.shape[0], prefix)
        presence = {
            name: part.presence
            for name, part in slices.items()
            if part.presence is not None
        }
        sliced = sliced_space(space, slices)
        view = LeavesView(
            sliced, replace(options, presence=presence), number, prefix, are_rows=True
        )
    elif vector is not None and is_vector(space):
        view = vector(space)
    else:
        view = LeavesView(space, options, number, prefix)
    _validate_use(options, view, sliced=bool(slices), prefix=prefix)
    view.rename(options, prefix)
    if slices:
        view = SlicedView(space, view, slices, number)  # type: ignore[arg-type]
    return _padded(view, options.max_tokens, prefix)


def _padded(
    view: TokenView, max_tokens: int | Mapping[str, int] | None, prefix: str
) -> TokenView:
    num_tokens = view.spec.num_tokens
    if max_tokens is None or isinstance(max_tokens, Mapping):
        return view
    if max_tokens < num_tokens:
        raise InputError(
            f"{prefix}max_tokens: expected at least {num_tokens}, the tokens of an "
            f"observation, got {max_tokens}"
        )
    return view if max_tokens == num_tokens else PaddedView(view, max_tokens)


def split_action_mask(
    space: spaces.Space[Any],
) -> tuple[spaces.Space[Any], spaces.Space[Any] | None]:
    """Split the space of the entry ``action_mask`` off a Dict; None without one."""
    if not isinstance(space, spaces.Dict) or MASK not in space.keys() - {*TOKEN_PARTS}:
        return space, None
    entries = {key: part for key, part in space.items() if key != MASK}
    return spaces.Dict(entries), space[MASK]


def is_vector(
    space: spaces.Space[Any],
) -> TypeGuard[spaces.Box | spaces.MultiBinary]:
    """Return whether observations are a vector of numbers."""
    plain = isinstance(space, spaces.Box | spaces.MultiBinary)
    return plain and len(space.shape or ()) == 1


def validate_space(space: spaces.Space[Any], where: str) -> None:
    """Raise InputError if a space cannot become tokens, and name similar ones that can.

    Args:
        space: of observations.
        where: start of the error.
    """
    if nearest := _refusal(space):
        raise InputError(
            f"{where}: expected observations that can become tokens, such as "
            f"{nearest}; got {' '.join(str(space).split()):.300}"
        )


def _refusal(space: spaces.Space[Any]) -> str:
    """Describe usable spaces similar to an unusable one; empty if it is usable."""
    observed, mask = split_action_mask(space)
    if mask is not None:
        if not mask_sizes(mask):
            return (
                "a Dict whose action_mask is a MultiBinary(n), a Box of (n,) or a "
                "Tuple of them"
            )
        return _refusal(observed) if len(observed) else "a Dict with an observation"  # type: ignore[arg-type]
    if element_space(space) is not None:
        return "" if becomes_rows(space) else NEAREST["Sequence"]
    match space:
        case spaces.Dict() | spaces.Tuple():
            return _refusal_of_entries(space)
        case spaces.Discrete() if int(space.n) <= MOST_OPTIONS:
            return ""
        case spaces.MultiDiscrete() if len(space.shape) in (1, 2) and space.nvec.size:
            if int(np.max(space.nvec)) <= MOST_OPTIONS:
                return ""
        case spaces.Box() | spaces.MultiBinary():
            shape = space.shape or ()
            if len(shape) <= 3 and 0 not in shape:
                return ""
            if len(shape) > 3:
                return (
                    "a Box of (H, W, C), with the frames as channels, or of (N, F), "
                    "with a row for each token"
                )
            return "a Box of (F,) or (N, F) whose sizes are at least 1"
    return NEAREST.get(type(space).__name__, NEAREST[""])


def _refusal_of_entries(space: spaces.Dict | spaces.Tuple) -> str:
    if isinstance(space, spaces.Dict) and {*space.keys()} == {*TOKEN_PARTS}:
        return "" if token_spec(space) else NEAREST["tokens"]
    entries = entries_of(space)
    if not entries:
        return "a Dict or Tuple with at least one entry"
    for _, entry in entries:
        if token_spec(entry) is not None and len(entries) > 1:
            return (
                "a Dict of features, types and padding alone, with a type for what the "
                "other entries hold, or a Dict of Boxes of (N, F), a type each"
            )
        if nearest := _refusal(entry):
            return nearest
    names = [name for name, _ in leaves_of(space)]
    if len(set(names)) < len(names):
        return "a Dict whose paths of keys, joined by /, differ"
    return ""


def _validate_token_names(
    space: spaces.Space[Any], options: TokenOptions, where: str, path: str = ""
) -> None:
    """Raise InputError for a Dict that is almost one of tokens.

    Otherwise its entries would be a set each. Masks named by options are exempt.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple) or token_spec(space):
        return
    masks = {*(options.presence_keys or {}).values()}
    masks |= {*(options.padding_keys or {}).values()}
    for key, entry in entries_of(space):
        _validate_token_names(entry, options, where, f"{path}{key}/")
    keys = [str(key) for key, _ in entries_of(space)]
    keys = [key for key in keys if f"{path}{key}" not in masks]
    similar = {name: difflib.get_close_matches(name, keys, n=1) for name in TOKEN_PARTS}
    missing = [name for name in TOKEN_PARTS if name not in keys]
    if len(missing) > 1 and not all(similar.values()):
        return
    near = [name for name in missing if similar[name]]
    hint = f"; did you mean {' and '.join(map(repr, near))}?" if near else ""
    raise InputError(
        f"{where}: expected features, types and padding{'' if missing else ' alone'}, "
        f"got {listed(keys)}{f' in {path[:-1]}' if path else ''}{hint}"
    )


_FIXED = "a Box of (N, F), padded to a fixed N, with a presence column or rows of zeros"
_TOKENS = "a Dict of features (N, F), types (N,) and padding (N,)"
NEAREST = {
    "Sequence": f"a Sequence of Boxes of (F,), or {_FIXED}",
    "Graph": f"{_TOKENS}, a token for each node, or {_FIXED}",
    "Text": "a MultiDiscrete of the characters' numbers, or a Discrete",
    "OneOf": "a Dict of the spaces and a Discrete that says which one counts",
    "Discrete": f"a MultiDiscrete of digits with at most {MOST_OPTIONS} choices each,"
    " or a Box of (1,)",
    "MultiDiscrete": f"a MultiDiscrete of one or two dimensions with at most "
    f"{MOST_OPTIONS} choices each, or a Box of (N, F)",
    "tokens": "a Dict of features, a Box of (N, F), types, a MultiDiscrete or a Box of "
    "integers of (N,), and padding, a MultiBinary(N)",
    "": f"a Box of (F,), (N, F) or (H, W, C), or {_TOKENS}",
}
"""Descriptions of usable spaces, by the class of an unusable one."""


def _validate_use(
    options: TokenOptions, view: TokenView, *, sliced: bool, prefix: str
) -> None:
    """Raise InputError for options about kinds of spaces that the observation lacks."""
    leaves = view.leaves if isinstance(view, LeavesView) else []
    names = view.names if isinstance(view, LeavesView) else []
    lists = view.lists if isinstance(view, LeavesView) else {}
    matrices = [
        name
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, RowsLeaf)
    ]
    images = any(isinstance(leaf, ImageLeaf) for leaf in leaves)
    defaults = TokenOptions()
    for keys, applies, kind in (
        (("padding", "presence", "type_features"), bool(matrices), "matrix of (N, F)"),
        (("patch", "channels"), images, "image of (H, W, C)"),
        (("presence_keys", "padding_keys"), len(leaves) > 0, "Dict of sets and masks"),
        (("slices",), sliced, "vector of (F,)"),
        (("drop",), bool(lists), "Sequence"),
    ):
        for key in keys:
            value, default = getattr(options, key), getattr(defaults, key)
            if value != default and not applies:
                raise InputError(
                    f"{prefix}{key}: expected {show(default)}, since the observation "
                    f"has no {kind}, got {show(value)}"
                )
    for key, choices in (("presence", matrices), ("max_tokens", [*lists])):
        value = getattr(options, key)
        for name in value if isinstance(value, Mapping) else ():
            if name not in choices:
                raise InputError(
                    f"{prefix}{key}: expected names of {listed(choices) or 'no set'}, "
                    f"got {name}"
                )


def _only_key(space: spaces.Space[Any]) -> Any:
    """Return the key of the only entry of a Dict or Tuple; None for others."""
    if not isinstance(space, spaces.Dict | spaces.Tuple) or len(space) != 1:
        return None
    return 0 if isinstance(space, spaces.Tuple) else next(iter(space.keys()))
