"""Base classes of tokenizers, and the generic tokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from marl_pool.observations.slots import Slots
from marl_pool.options.types import Extent
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class Observer:
    """The group of agents whose observations a tokenizer converts."""

    group: str
    """Name of the group."""
    agents: tuple[str, ...]
    """Names of its agents in the PettingZoo env."""
    all_agents: tuple[str, ...]
    """Names of the agents of all groups, in the env's order."""
    size: int
    """Length F of one observation."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments with which the env was built."""
    device: torch.device | str = "cpu"


class Tokenizer(ABC):
    """Conversion of one group's flat observations to tokens.

    A subclass takes an `Observer` in its constructor and implements ``__call__``.
    See `FeatureTokenizer` for a minimal one.

    Args:
        observer: the group of agents whose observations are converted.
        spec: shape and type names of the tokens.
        types: ``(N,)`` type of each slot; None for 0 everywhere.
        padding: ``(N,)`` bool, True for slots without a token; None for no padding.
    """

    def __init__(
        self,
        observer: Observer,
        spec: TokenSpec,
        types: Sequence[int] | None = None,
        padding: Sequence[bool] | None = None,
    ) -> None:
        self.observer, self.spec = observer, spec
        count, device = spec.num_tokens, observer.device
        self._types = torch.tensor(types or [0] * count, device=device)
        self._padding = torch.tensor(padding or [False] * count, device=device)

    @abstractmethod
    def __call__(self, observations: Tensor) -> Tokens:
        """Convert observations ``(B, F)`` to tokens ``(B, N, …)``."""

    @property
    def slots(self) -> Slots:
        """The slots, with fixed types and padding, that tokens return to."""
        padding, types = self._padding.tolist(), self._types.tolist()
        # A slot that is always padding holds no token of any type.
        kinds = [
            -1 if padded else kind for kind, padded in zip(types, padding, strict=True)
        ]
        names = self.spec.type_names
        return Slots(tuple(kinds), tuple(range(len(names))), tuple(padding), names)

    def invert(self, tokens: Tokens) -> Tensor:
        """Convert tokens in their `slots` back to observations ``(B, F)``.

        Raises:
            InputError: by default.
        """
        raise InputError(
            f"env.tokenizer: expected one whose tokens become observations again, got "
            f"{type(self).__name__}, which has no invert"
        )

    def tokens(self, features: Tensor) -> Tokens:
        """Add the constructor's types and padding to features ``(B, N, F)``."""
        batch = len(features)
        types = self._types.expand(batch, -1).contiguous()
        return Tokens(features, types, self._padding.expand(batch, -1).contiguous())


class FeatureTokenizer(Tokenizer):
    """Tokenizer that makes each number of an observation a token of a separate type.

    Token i has one feature, ``observation[i]``, and the type ``feature_i``. Only the
    type identifies a number, so a policy needs a type embedding. No token belongs to
    the observing agent.
    """

    def __init__(self, observer: Observer) -> None:
        names = tuple(f"feature_{i}" for i in range(observer.size))
        spec = TokenSpec(observer.size, 1, names, has_self=False, positions=())
        super().__init__(observer, spec, range(observer.size))

    @override
    def __call__(self, observations: Tensor) -> Tokens:
        return self.tokens(observations[..., None])

    @override
    def invert(self, tokens: Tokens) -> Tensor:
        return tokens.features[..., 0]


class Slot(NamedTuple):
    """One token, and the position of its features in the observation."""

    type: str
    places: tuple[int | None, ...]
    """Index of each feature in the observation; None for a feature that is 0."""
    padded: bool = False


class SlotTokenizer(Tokenizer):
    """Tokenizer whose features have fixed positions in the observation.

    The first of the ``type_names`` is the observing agent's. For ``signal_types``
    and ``positions`` see `TokenSpec`.
    """

    def __init__(
        self,
        observer: Observer,
        type_names: Sequence[str],
        slots: Sequence[Slot],
        signal_types: Sequence[str] = (),
        positions: Sequence[Extent] | None = None,
    ) -> None:
        names = tuple(type_names)
        spec = TokenSpec(
            len(slots),
            len(slots[0].places),
            names,
            signal_types=tuple(signal_types),
            positions=None if positions is None else tuple(positions),
        )
        types = [names.index(slot.type) for slot in slots]
        super().__init__(observer, spec, types, [slot.padded for slot in slots])
        # Index F is a zero that `__call__` appends.
        zero = observer.size
        flat = [zero if at is None else at for slot in slots for at in slot.places]
        self._places = torch.tensor(flat, device=observer.device)

    @override
    def __call__(self, observations: Tensor) -> Tokens:
        shape = (len(observations), self.spec.num_tokens, self.spec.num_features)
        return self.tokens(pad(observations, (0, 1))[:, self._places].view(shape))

    @override
    def invert(self, tokens: Tokens) -> Tensor:
        size = self.observer.size
        if unread := {*range(size)} - {*self._places.tolist()}:
            raise InputError(
                f"env.tokenizer: expected features for all {size} numbers of an "
                f"observation, since tokens become observations again, got none for "
                f"number {min(unread)}"
            )
        values = tokens.features.new_zeros(len(tokens.types), size + 1)
        places = self._places.to(values.device).expand(len(values), -1)
        return values.scatter(1, places, tokens.features.flatten(1))[:, :-1]
