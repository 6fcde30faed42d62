"""Shared parts of the tokenizers of mpe2's particle envs."""

from collections.abc import Mapping
from typing import NoReturn

from marl_pool.envs.tokenizers.base import Observer, Slot, SlotTokenizer
from marl_pool.utils.errors import InputError

Places = tuple[int, ...]
"""Indices of a vector's numbers in the observation."""


class ObservationLayout:
    """Parser of an mpe2 observation, from left to right, that collects tokens.

    Args:
        name: name of the tokenizer, for messages.
        observer: the group of agents whose observation is parsed.
        parts: number of features of each part of a token, by name.
    """

    def __init__(self, name: str, observer: Observer, parts: Mapping[str, int]) -> None:
        self.name, self.observer, self.parts = name, observer, dict(parts)
        self.size = 0
        self.slots: list[Slot] = []

    def read(self, count: int, length: int = 2) -> list[Places]:
        """Return the indices of the next ``count`` vectors of ``length`` numbers."""
        start, self.size = self.size, self.size + count * length
        return [tuple(range(at, at + length)) for at in range(start, self.size, length)]

    def add(self, type_: str, *, padded: bool = False, **parts: Places) -> None:
        """Add a token with the named parts; the other parts are zero."""
        places: list[int | None] = []
        for part, length in self.parts.items():
            places += parts.get(part, [None] * length)
        self.slots.append(Slot(type_, tuple(places), padded))

    def features(self, part: str) -> tuple[int, ...]:
        """Return the indices of the features of a part; () if there is no such part."""
        names = [name for name, length in self.parts.items() for _ in range(length)]
        return tuple(i for i, name in enumerate(names) if name == part)

    def count(self, prefix: str) -> int:
        """Count the agents named ``prefix_0``, ``prefix_1``, ….

        Raises:
            InputError: agents with other names.
        """
        kinds = [agent.rpartition("_")[0] for agent in self.observer.all_agents]
        if not set(kinds) <= {"adversary", "agent"}:
            self.fail(
                f"expected agents named agent_N or adversary_N, "
                f"got {', '.join(self.observer.all_agents)}"
            )
        return kinds.count(prefix)

    def kind(self) -> str:
        """Return the kind of the group's agents, ``agent`` or ``adversary``.

        Raises:
            InputError: a group of both kinds.
        """
        kinds = {agent.rpartition("_")[0] for agent in self.observer.agents}
        if len(kinds) > 1:
            self.fail(f"group {self.observer.group!r} mixes {', '.join(sorted(kinds))}")
        return kinds.pop()

    def visible(self, option: str, count: int) -> int:
        """Return the number of vectors in the observation for ``count`` entities.

        An option of partial observability limits it to the nearest entities; missing
        ones are zeros.
        """
        limit: int | None = self.observer.options.get(option)
        return count if limit is None else limit

    def reject_neighbors(self) -> None:
        """Reject partial observability of agents of several kinds.

        Raises:
            InputError: ``num_agent_neighbors`` is set.
        """
        if self.observer.options.get("num_agent_neighbors") is not None:
            self.fail(
                "expected num_agent_neighbors=None, because the observation does not "
                "identify adversaries among neighbors; tokenizer=features reads any"
            )

    def check(self) -> None:
        """Check that the whole observation was parsed.

        Raises:
            InputError: its length differs.
        """
        if self.size != self.observer.size:
            self.fail(
                f"reads {self.size} numbers in {len(self.slots)} tokens, but group "
                f"{self.observer.group!r} observes {self.observer.size}"
            )

    def fail(self, reason: str) -> NoReturn:
        """Raise an InputError that names the tokenizer."""
        raise InputError(f"env.tokenizer: {self.name}: {reason}")


class MpeTokenizer(SlotTokenizer):
    """Tokenizer of a completely parsed `ObservationLayout`.

    Args:
        layout: the parsed observation.
        type_names: names of the types; the first is the type of the observing agent.
        signal_types: types that matter for the task; empty if unknown.

    Raises:
        InputError: the layout and the observation differ in size.
    """

    def __init__(
        self,
        layout: ObservationLayout,
        type_names: tuple[str, ...],
        signal_types: tuple[str, ...] = (),
    ) -> None:
        layout.check()
        super().__init__(
            layout.observer,
            type_names,
            layout.slots,
            signal_types,
            layout.features("position"),
        )
