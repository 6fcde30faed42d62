"""What the tokenizers of mpe2's particle envs share."""

from collections.abc import Mapping
from typing import NoReturn

from marl_pool.envs.tokenizers.base import Observer, Slot, SlotTokenizer
from marl_pool.utils.errors import InputError

Places = tuple[int, ...]
"""Where the numbers of a vector stand in the observation."""


class ObservationLayout:
    """Reads an observation of mpe2 from left to right, and collects tokens.

    Args:
        name: of the tokenizer, for messages.
        observer: whose observation it is.
        parts: of a token, by name, with the number of features of each.
    """

    def __init__(self, name: str, observer: Observer, parts: Mapping[str, int]) -> None:
        self.name, self.observer, self.parts = name, observer, dict(parts)
        self.size = 0
        self.slots: list[Slot] = []

    def read(self, count: int, length: int = 2) -> list[Places]:
        """The places of the next ``count`` vectors of ``length`` numbers."""
        start, self.size = self.size, self.size + count * length
        return [tuple(range(at, at + length)) for at in range(start, self.size, length)]

    def add(self, type_: str, *, padded: bool = False, **parts: Places) -> None:
        """Add a token that has the named parts, and zeros for the others."""
        places: list[int | None] = []
        for part, length in self.parts.items():
            places += parts.get(part, [None] * length)
        self.slots.append(Slot(type_, tuple(places), padded))

    def features(self, part: str) -> tuple[int, ...]:
        """Which features of a token are the named part; () if it has none."""
        names = [name for name, length in self.parts.items() for _ in range(length)]
        return tuple(i for i, name in enumerate(names) if name == part)

    def count(self, prefix: str) -> int:
        """How many agents of the env are called ``prefix_0``, ``prefix_1``, ….

        Raises:
            InputError: agents of other names.
        """
        kinds = [agent.rpartition("_")[0] for agent in self.observer.all_agents]
        if not set(kinds) <= {"adversary", "agent"}:
            self.refuse(
                f"expected agents named agent_N or adversary_N, "
                f"got {', '.join(self.observer.all_agents)}"
            )
        return kinds.count(prefix)

    def kind(self) -> str:
        """What the group's agents are: ``agent`` or ``adversary``.

        Raises:
            InputError: some are this, some that.
        """
        kinds = {agent.rpartition("_")[0] for agent in self.observer.agents}
        if len(kinds) > 1:
            self.refuse(
                f"group {self.observer.group!r} mixes {', '.join(sorted(kinds))}"
            )
        return kinds.pop()

    def visible(self, option: str, count: int) -> int:
        """How many vectors the observation has for ``count`` entities.

        All of them, or as many as an option of partial observability says: the
        nearest ones, and zeros where there are fewer.
        """
        limit: int | None = self.observer.options.get(option)
        return count if limit is None else limit

    def refuse_neighbors(self) -> None:
        """Refuse partial observability of agents of several kinds.

        Raises:
            InputError: the env has the option.
        """
        if self.observer.options.get("num_agent_neighbors") is not None:
            self.refuse(
                "with num_agent_neighbors the observation does not say which "
                "neighbors are adversaries; tokenizer=features reads any"
            )

    def check(self) -> None:
        """Hold what was read to the observation's size.

        Raises:
            InputError: they differ.
        """
        if self.size != self.observer.size:
            self.refuse(
                f"reads {self.size} numbers in {len(self.slots)} tokens, but group "
                f"{self.observer.group!r} observes {self.observer.size}"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise an InputError in the name of the tokenizer."""
        raise InputError(f"env.tokenizer: {self.name}: {reason}")


class MpeTokenizer(SlotTokenizer):
    """Tokens of a layout that was read to its end.

    Args:
        layout: all of the observation.
        type_names: of the types, the observer's own first.
        signal_types: those that matter for the task; empty: not known.

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
