"""Tokenizers of mpe2's particle envs.

Their source is ``Scenario.observation`` of mpe2 1.1: each parses an observation from
left to right.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from typing_extensions import override

from marl_pool.envs.tokenizers.base import Observer, Slot, SlotTokenizer
from marl_pool.utils.errors import InputError

Places = tuple[int, ...]
"""Indices of a vector's numbers in the observation."""


class ObservationLayout:
    """Parser of an mpe2 observation that collects tokens.

    Args:
        name: name of the tokenizer, for messages.
        observer: the group of agents whose observation is parsed.
        parts: names of the vectors of two numbers that a token consists of.

    Attributes:
        others: numbers of the other agents by kind.

    Raises:
        InputError: agents with other names, or a group of both kinds.
    """

    def __init__(self, name: str, observer: Observer, parts: Sequence[str]) -> None:
        self.name, self.observer, self.parts = name, observer, parts
        self.size = 0
        self.slots: list[Slot] = []
        # Count the agents of each kind; observations list them by kind.
        self.others = Counter(a.rpartition("_")[0] for a in observer.all_agents)
        if not set(self.others) <= {"adversary", "agent"}:
            self.fail(
                f"expected agents named agent_N or adversary_N, "
                f"got {', '.join(observer.all_agents)}"
            )
        # All agents of the group are of one kind; an agent does not observe itself.
        kinds = {agent.rpartition("_")[0] for agent in observer.agents}
        if len(kinds) > 1:
            self.fail(f"group {observer.group!r} mixes {', '.join(sorted(kinds))}")
        (kind,) = kinds
        self.others[kind] -= 1

    def read(self, count: int) -> list[Places]:
        """Return the indices of the next ``count`` vectors of two numbers."""
        start, self.size = self.size, self.size + 2 * count
        return [(at, at + 1) for at in range(start, self.size, 2)]

    def add(self, type_: str, *, padded: bool = False, **parts: Places) -> None:
        """Add a token with the named parts; the other parts are zero."""
        places: list[int | None] = []
        for part in self.parts:
            places += parts.get(part, (None, None))
        self.slots.append(Slot(type_, tuple(places), padded))

    def add_positions(self, type_: str, count: int, present: int | None = None) -> None:
        """Read relative positions, a token each, padded from ``present`` on."""
        for i, place in enumerate(self.read(count)):
            padded = present is not None and i >= present
            self.add(type_, position=place, padded=padded)

    def visible(self, option: str, count: int) -> int:
        """Return the number of vectors in the observation for ``count`` entities.

        An option of partial observability limits it to the nearest entities; missing
        ones are zeros.
        """
        limit: int | None = self.observer.options.get(option)
        return count if limit is None else limit

    def fail(self, reason: str) -> NoReturn:
        """Raise an InputError that names the tokenizer."""
        raise InputError(f"env.tokenizer: {self.name}: {reason}")


class MpeTokenizer(SlotTokenizer):
    """Tokenizer that parses the observation by an `ObservationLayout`.

    All tokens are signal, and begin with a position.

    Raises:
        InputError: a wrong length of the observation, agents with other names, or
            ``num_agent_neighbors`` where it hides the kinds of agents.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Names of the vectors of two numbers that a token consists of."""
    type_names: ClassVar[tuple[str, ...]]
    neighbors: ClassVar[bool] = True
    """True if the observation may be limited to the nearest agents."""

    def __init__(self, observer: Observer) -> None:
        layout = ObservationLayout(self.name, observer, self.parts)
        hidden = observer.options.get("num_agent_neighbors") is not None
        if hidden and not self.neighbors:
            layout.fail(
                "expected num_agent_neighbors=None, because the observation does not "
                "identify adversaries among neighbors; tokenizer=features reads any"
            )
        # Whatever remains unread shows that the layout is another one.
        self._parse(layout)
        if layout.size != observer.size:
            layout.fail(
                f"reads {layout.size} numbers in {len(layout.slots)} tokens, but group "
                f"{observer.group!r} observes {observer.size}"
            )
        names = self.type_names
        super().__init__(observer, names, layout.slots, names, positions=(0, 1))

    @abstractmethod
    def _parse(self, layout: ObservationLayout) -> None:
        """Read the whole observation, and add its tokens."""


class SimpleSpreadTokenizer(MpeTokenizer):
    """Self, landmarks and other agents of mpe2's simple_spread_v3.

    =========  =============  ========  ====================
    type       0, 1           2, 3      4, 5
    =========  =============  ========  ====================
    self       position       velocity  0
    landmark   relative pos.  0         0
    agent      relative pos.  0         communication
    =========  =============  ========  ====================

    Slots beyond the number of entities are padding, where ``num_agent_neighbors`` or
    ``num_landmark_neighbors`` exceeds it. All tokens are signal: agents cover the
    landmarks and avoid each other.

    Observation: own velocity, own position, relative positions of landmarks and of
    other agents, their communication.
    """

    name = "simple_spread"
    parts = ("position", "velocity", "communication")
    type_names = ("self", "landmark", "agent")

    @override
    def _parse(self, layout: ObservationLayout) -> None:
        others = layout.others["agent"]
        velocity, position = layout.read(2)
        layout.add("self", position=position, velocity=velocity)
        landmarks = layout.visible("num_landmark_neighbors", others + 1)
        layout.add_positions("landmark", landmarks, present=others + 1)
        visible = layout.visible("num_agent_neighbors", others)
        places, messages = layout.read(visible), layout.read(visible)
        for i, (place, message) in enumerate(zip(places, messages, strict=True)):
            padded = i >= others
            layout.add("agent", position=place, communication=message, padded=padded)


class SimpleTagTokenizer(MpeTokenizer):
    """Self, obstacles, adversaries and good agents of mpe2's simple_tag_v3.

    =========  =============  ========
    type       0, 1           2, 3
    =========  =============  ========
    self       position       velocity
    obstacle   relative pos.  0
    adversary  relative pos.  0
    agent      relative pos.  velocity
    =========  =============  ========

    Obstacles collide here, so all tokens are signal.

    Observation: own velocity, own position, relative positions of obstacles and of
    other agents (adversaries first), velocities of the good agents among them. The
    number of obstacles is the env's option ``num_obstacles``.
    """

    name = "simple_tag"
    parts = ("position", "velocity")
    type_names = ("self", "obstacle", "adversary", "agent")
    neighbors = False

    @override
    def _parse(self, layout: ObservationLayout) -> None:
        obstacles = layout.observer.options.get("num_obstacles", 2)
        velocity, position = layout.read(2)
        layout.add("self", position=position, velocity=velocity)
        visible = layout.visible("num_landmark_neighbors", obstacles)
        layout.add_positions("obstacle", visible, present=obstacles)
        layout.add_positions("adversary", layout.others["adversary"])
        agents = layout.others["agent"]
        places, moves = layout.read(agents), layout.read(agents)
        for place, move in zip(places, moves, strict=True):
            layout.add("agent", position=place, velocity=move)
