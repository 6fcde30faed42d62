"""From a Gymnasium space to its view as tokens."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from marl_pool.observations.leaves import (
    LARGEST_CHOICE,
    ImageLeaf,
    Leaf,
    RowsLeaf,
    make_leaf,
)
from marl_pool.observations.masks import MASK, MaskPart, mask_sizes
from marl_pool.observations.parts import PlainSpace
from marl_pool.observations.token_dict import TOKEN_PARTS, TokenDictView, token_spec
from marl_pool.observations.view import (
    SELF_NAME,
    EntryView,
    PaddedView,
    TokenOptions,
    TokenView,
    read_entries,
)
from marl_pool.options.signatures import show
from marl_pool.tokens import Tokens, TokenSpec
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

    - A Dict of ``features``, ``types`` and ``padding`` is tokens already.
    - A matrix, a Box or MultiBinary of ``(N, F)``, is N tokens.
    - An image, a Box or MultiBinary of ``(H, W, C)``, a Box of ``(H, W)`` bytes up to
      255, or any ``(H, W)`` if there is a ``patch``, is cut into patches with their
      places.
    - A Discrete is a one-hot token; a MultiDiscrete is one for each number, or row.
    - A vector is a token for each number, or what ``vector`` makes of it.
    - A Dict or Tuple is the tokens of all entries, filled with zeros to the same width.
      Types are named by the path of keys; an entry ``self`` is the observer's own. A
      vector in it is one token.

    The entry ``action_mask`` of a Dict says which actions are valid; it is stored as a
    part beside the observation, and is no token. A Dict or Tuple of one other entry is
    that entry.

    Args:
        space: of the observations.
        options: how they become tokens.
        number: NumPy dtype in which floats are stored.
        vector: makes the view of an observation that is a vector.
        where: begin of the error about a space that cannot become tokens.
        prefix: begin of errors about options.

    Raises:
        InputError: a space that cannot become tokens, or options that do not fit it.
    """
    validate_space(space, where)
    # An action mask, and a Dict or Tuple around one entry, are no tokens.
    observed, mask = split_action_mask(space)
    key = _only_key(observed)
    entry = observed if key is None else dict(_entries(observed))[key]  # type: ignore[arg-type]
    if entry is not space:
        stored = None if mask is None else MaskPart.of(mask, number)
        inner = make_view(
            entry, options, number=number, vector=vector, where=where, prefix=prefix
        )
        return EntryView(inner, key, stored)
    leaves: list[Leaf] = []
    if token_spec(space) is not None:
        view: TokenView = TokenDictView(space, number)
    elif vector is not None and is_vector(space):
        view = vector(space)
    else:
        view = view_of_leaves = LeavesView(space, options, number, prefix)
        leaves = view_of_leaves.leaves
    _validate_use(options, leaves, prefix)
    view.rename(options, prefix)
    return _padded(view, options.max_tokens, prefix)


def _padded(view: TokenView, max_tokens: int | None, prefix: str) -> TokenView:
    num_tokens = view.spec.num_tokens
    if max_tokens is None or max_tokens == num_tokens:
        return view
    if max_tokens < num_tokens:
        raise InputError(
            f"{prefix}max_tokens: expected at least {num_tokens}, the tokens of an "
            f"observation, got {max_tokens}"
        )
    return PaddedView(view, max_tokens)


class LeavesView(TokenView):
    """The view of a space as the tokens of all plain spaces inside it, the leaves.

    Args:
        space: a space that `validate_space` accepts.
        options: how it becomes tokens.
        number: NumPy dtype in which floats are stored.
        prefix: begin of errors about options.
    """

    def __init__(
        self, space: spaces.Space[Any], options: TokenOptions, number: Any, prefix: str
    ) -> None:
        self.space = space
        leaf_spaces = dict(_leaves(space))
        alone = len(leaf_spaces) == 1
        by_name = {
            name: make_leaf(leaf, name, options, number, alone=alone, prefix=prefix)
            for name, leaf in leaf_spaces.items()
        }
        self.leaves = [*by_name.values()]
        self.names = [name or WHOLE for name in by_name]
        # Bytes are kept where the observation is one image.
        self.dtype = torch.from_numpy(np.zeros(0, number)).dtype
        if alone and self.leaves[0].keeps_bytes:
            self.dtype = torch.uint8
        self.width = max(leaf.num_features for leaf in self.leaves)
        spec = TokenSpec(
            sum(leaf.num_tokens for leaf in self.leaves),
            self.width,
            tuple(name for leaf in self.leaves for name in leaf.type_names),
            has_self=False,
            dtype="uint8" if self.dtype == torch.uint8 else "float32",
            positions=self.leaves[0].positions if alone else (),
        )
        parts = zip(self.names, self.leaves, strict=True)
        super().__init__(spec, {name: leaf.part for name, leaf in parts})
        if SELF_NAME in spec.type_names:
            self.rename(TokenOptions(token_types=spec.type_names))

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        if WHOLE in self.parts:
            return {WHOLE: observation}
        return dict(_values(self.space, observation))

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        features, types, padding, first = [], [], [], 0
        for name, leaf in zip(self.names, self.leaves, strict=True):
            values = parts[name]
            added = self.width - leaf.num_features
            features.append(pad(leaf.features(values, self.dtype), (0, added)))
            types.append(leaf.types(values) + first)
            padding.append(leaf.padding(values))
            first += len(leaf.type_names)
        if first == 1 or len(features) == 1:
            return Tokens(features[0], types[0], padding[0])
        joined = torch.cat(features, -2), torch.cat(types, -1), torch.cat(padding, -1)
        return Tokens(*joined)


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
    """Raise InputError if a space cannot become tokens, with descriptions that can.

    Args:
        space: of observations.
        where: begin of the error.
    """
    if nearest := _refusal(space):
        raise InputError(
            f"{where}: expected observations that can become tokens, such as "
            f"{nearest}; got {' '.join(str(space).split()):.300}"
        )


def _refusal(space: spaces.Space[Any]) -> str:
    """Return the nearest descriptions to a space that cannot become tokens."""
    observed, mask = split_action_mask(space)
    if mask is not None:
        if not mask_sizes(mask):
            return (
                "a Dict whose action_mask is a MultiBinary(n), a Box of (n,) or a "
                "Tuple of them"
            )
        return _refusal(observed) if len(observed) else "a Dict with an observation"  # type: ignore[arg-type]
    match space:
        case spaces.Dict() | spaces.Tuple():
            return _refusal_of_entries(space)
        case spaces.Discrete() if int(space.n) <= LARGEST_CHOICE:
            return ""
        case spaces.MultiDiscrete() if len(space.shape) in (1, 2) and space.nvec.size:
            if int(np.max(space.nvec)) <= LARGEST_CHOICE:
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
    entries = _entries(space)
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
    names = [name for name, _ in _leaves(space)]
    if len(set(names)) < len(names):
        return "a Dict whose paths of keys, joined by /, differ"
    return ""


WHOLE = "observation"
"""Name of the part of an observation that is one array."""
_FIXED = "a Box of (N, F), padded to a fixed N, with a presence column or rows of zeros"
_TOKENS = "a Dict of features (N, F), types (N,) and padding (N,)"
NEAREST = {
    "Sequence": f"{_FIXED}, or {_TOKENS}",
    "Graph": f"{_TOKENS}, a token for each node, or {_FIXED}",
    "Text": "a MultiDiscrete of the characters' numbers, or a Discrete",
    "OneOf": "a Dict of the spaces and a Discrete that says which one counts",
    "Discrete": f"a MultiDiscrete of digits with at most {LARGEST_CHOICE} choices each,"
    " or a Box of (1,)",
    "MultiDiscrete": f"a MultiDiscrete of one or two dimensions with at most "
    f"{LARGEST_CHOICE} choices each, or a Box of (N, F)",
    "tokens": "a Dict of features, a Box of (N, F), types, a MultiDiscrete or a Box of "
    "integers of (N,), and padding, a MultiBinary(N)",
    "": f"a Box of (F,), (N, F) or (H, W, C), or {_TOKENS}",
}
"""By the class of a space that cannot become tokens: descriptions that can."""


def _validate_use(options: TokenOptions, leaves: list[Leaf], prefix: str) -> None:
    """Raise InputError for an option of a matrix or image where there is none."""
    rows = any(isinstance(leaf, RowsLeaf) for leaf in leaves)
    images = any(isinstance(leaf, ImageLeaf) for leaf in leaves)
    defaults = TokenOptions()
    for keys, applies, kind in (
        (("padding", "presence", "type_features"), rows, "matrix of (N, F)"),
        (("patch", "channels"), images, "image of (H, W, C)"),
    ):
        for key in keys:
            value, default = getattr(options, key), getattr(defaults, key)
            if value != default and not applies:
                raise InputError(
                    f"{prefix}{key}: expected {show(default)}, since the observation "
                    f"has no {kind}, got {show(value)}"
                )


def _only_key(space: spaces.Space[Any]) -> Any:
    """Return the key of the only entry of a Dict or Tuple; None for others."""
    if not isinstance(space, spaces.Dict | spaces.Tuple) or len(space) != 1:
        return None
    return 0 if isinstance(space, spaces.Tuple) else next(iter(space.keys()))


def _entries(
    space: spaces.Dict | spaces.Tuple,
) -> list[tuple[Any, spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        return [*space.items()]
    return [*enumerate(space.spaces)]


def _leaves(
    space: spaces.Space[Any], name: str = ""
) -> Iterator[tuple[str, PlainSpace]]:
    """Yield the plain spaces inside a space with their paths."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, entry in _entries(space):
            yield from _leaves(entry, f"{name}/{key}" if name else str(key))
    else:
        yield name, space  # type: ignore[misc]


def _values(
    space: spaces.Space[Any], observation: Any, name: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values in an observation by the paths of `_leaves`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = _entries(space)
        keys = [key for key, _ in entries]
        values = read_entries(observation, keys, name)
        for key, entry in entries:
            path = f"{name}/{key}" if name else str(key)
            yield from _values(entry, values[key], path)
    else:
        yield name, observation
