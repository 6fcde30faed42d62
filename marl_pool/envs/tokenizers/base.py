"""What every tokenizer is, and the kind that only rearranges numbers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from marl_pool.tokens import Tokens, TokenSpec


@dataclass(frozen=True)
class Observer:
    """Whose observations are read: the agents of one group.

    Attributes:
        group: its name.
        agents: the names of its agents, as the env calls them.
        all_agents: those of every group, in the env's order.
        size: F, the numbers in one observation.
        options: the keyword arguments that the env was built with.
        device: where the observations are.
    """

    group: str
    agents: tuple[str, ...]
    all_agents: tuple[str, ...]
    size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | str = "cpu"


class Tokenizer(ABC):
    """From the flat observations of one group's agents to tokens.

    A subclass's constructor takes the `Observer`, and it writes ``__call__``.

    Args:
        observer: whose observations are read.
        spec: of the tokens.
        types: ``(N,)`` the type of each slot; None for 0 everywhere.
        padding: ``(N,)`` bool, True for slots that never hold a token; None for none.
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
        """Turn observations ``(B, F)`` into tokens ``(B, N, …)``, row by row."""

    def tokens(self, features: Tensor) -> Tokens:
        """``features`` ``(B, N, F)`` with the types and padding of the constructor."""
        batch = len(features)
        types = self._types.expand(batch, -1).contiguous()
        return Tokens(features, types, self._padding.expand(batch, -1).contiguous())


class Slot(NamedTuple):
    """One token, and where its features stand in the observation."""

    type: str
    places: tuple[int | None, ...]
    """Of each feature; None for one that it does not have, which reads 0."""
    padded: bool = False


class SlotTokenizer(Tokenizer):
    """Tokens whose features each stand at a fixed place in the observation.

    Args:
        observer: whose observations are read.
        type_names: of the types, ``type_names[0]`` the observer's own.
        slots: the tokens, in order.
        signal_types: names of the types that matter for the task; empty: not known.
        positions: numbers of the features that are a position; None: not known.
    """

    def __init__(
        self,
        observer: Observer,
        type_names: Sequence[str],
        slots: Sequence[Slot],
        signal_types: Sequence[str] = (),
        positions: Sequence[int] | None = None,
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
        # Place F is a zero that `__call__` appends.
        zero = observer.size
        flat = [zero if at is None else at for slot in slots for at in slot.places]
        self._places = torch.tensor(flat, device=observer.device)

    def __call__(self, observations: Tensor) -> Tokens:
        """Pick each feature from its place."""
        shape = (len(observations), self.spec.num_tokens, self.spec.num_features)
        return self.tokens(pad(observations, (0, 1))[:, self._places].view(shape))
