"""Observations that are already tokens: Dicts of features, types and padding."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.observations.parts import Part
from marl_pool.observations.slots import Slots
from marl_pool.observations.view import SELF_NAME, Arrays, TokenView, read_entries
from marl_pool.tokens import Tokens, TokenSpec

TOKEN_PARTS = ("features", "types", "padding")
"""Keys of an observation that consists of tokens."""
MOST_TYPES = 1 << 10
"""Largest number of types in a Dict of tokens."""


def token_spec(space: spaces.Space[Any]) -> TokenSpec | None:
    """Return the spec of a Dict of `TOKEN_PARTS`; None for another space.

    Features are a Box or MultiBinary of ``(N, F)``, types integers of ``(N,)`` and
    padding bools, or numbers 0 and 1, of ``(N,)``. Type 0 is the observer's own token,
    as everywhere in this package.
    """
    if not isinstance(space, spaces.Dict) or {*space.keys()} != {*TOKEN_PARTS}:
        return None
    features, types, padding = (space[name] for name in TOKEN_PARTS)
    arrays = (spaces.Box, spaces.MultiBinary)
    if not isinstance(features, arrays) or len(features.shape or ()) != 2:
        return None
    count, width = features.shape or ()
    integers = (*arrays, spaces.MultiDiscrete)
    if not all(isinstance(part, integers) for part in (types, padding)):
        return None
    if types.shape != (count,) or padding.shape != (count,) or not count * width:
        return None
    if not np.issubdtype(types.dtype, np.integer):
        return None
    bounds = Part.of(padding, "padding", np.float64)  # type: ignore[arg-type]
    kinds = Part.of(types, "types", np.float64)  # type: ignore[arg-type]
    num_types = int(kinds.high.max()) + 1
    if not 0 < num_types <= MOST_TYPES:
        return None
    # Padding is 0 or 1; the bounds of floats may be rounded.
    if bounds.declared.kind != "b" and (
        bounds.low.min() < -0.01 or bounds.high.max() > 1.01
    ):
        return None
    # The space bounds the types, but does not name them.
    names = (SELF_NAME, *(f"type_{i}" for i in range(1, num_types)))
    # Bytes of the full range are patches of an image, which policies divide by 255.
    is_image = features.dtype == np.uint8 and bool(np.all(features.high == 255))  # type: ignore[union-attr]
    return TokenSpec(count, width, names, dtype="uint8" if is_image else "float32")


class TokenDictView(TokenView):
    """The view of a Dict of `TOKEN_PARTS`; uint8 features up to 255 stay uint8.

    Features and types of padded tokens may be any numbers.

    Args:
        space: a space for which `token_spec` is not None.
        number: NumPy dtype in which floats are stored.
    """

    def __init__(self, space: spaces.Space[Any], number: Any) -> None:
        spec = token_spec(space)
        assert spec is not None
        assert isinstance(space, spaces.Dict)
        parts = {
            name: Part.of(space[name], name, number)  # type: ignore[arg-type]
            for name in TOKEN_PARTS
        }
        # A space may have -1 for slots without a token, where nothing is checked.
        if (types := parts["types"]).low.min() < 0:
            low, reason = np.maximum(types.low, 0), "where there is a token"
            parts["types"] = replace(types, low=low, reason=reason)
        super().__init__(spec, parts)
        self.shows_tokens = self.takes_any_number = True
        self.sets = frozenset(TOKEN_PARTS)
        self.dtype = torch.from_numpy(np.zeros(0, number)).dtype

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        return read_entries(observation, TOKEN_PARTS)

    @override
    def arbitrary(self, name: str, arrays: Arrays) -> np.ndarray | None:
        if name == "padding":
            return None
        # Environments may leave anything in slots without a token.
        padding = arrays["padding"] != 0
        return padding[..., None] if name == "features" else padding

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        features, types, padding = (parts[name] for name in TOKEN_PARTS)
        if self.spec.dtype != "uint8" and not features.is_floating_point():
            features = features.to(self.dtype)
        return Tokens(features, types.long(), padding.bool())

    @property
    @override
    def slots(self) -> Slots:
        count, num_types = self.spec.num_tokens, self.spec.num_types
        return Slots(
            slot_kinds=(0,) * count,
            type_kinds=(0,) * num_types,
            optional=(True,) * count,
            type_names=self.spec.type_names,
        )

    @override
    def invert(self, tokens: Tokens) -> dict[str, Tensor]:
        return dict(zip(TOKEN_PARTS, tokens[:3], strict=True))

    @override
    def join(self, values: Mapping[str, np.ndarray]) -> Any:
        return {name: values[name] for name in TOKEN_PARTS}
