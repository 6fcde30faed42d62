"""Tokenizers of mpe2's particle envs.

Their source is ``Scenario.observation`` of mpe2 1.1: each parses an observation from
left to right.
"""

from abc import abstractmethod
from collections import Counter
from itertools import chain
from typing import ClassVar, NoReturn

from typing_extensions import override

from marl_pool.envs.tokenizers.base import Observer, Slot, SlotTokenizer
from marl_pool.utils.errors import InputError

Places = tuple[int, ...]
"""Indices of a vector's numbers in the observation."""


class MpeTokenizer(SlotTokenizer):
    """Tokenizer that parses the observation from left to right.

    All tokens are signal, and begin with a position.

    Raises:
        InputError: a wrong length of the observation, agents with other names, a group
            of both kinds, or ``num_agent_neighbors`` where it hides the kinds.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Names of the vectors of two numbers that a token consists of."""
    type_names: ClassVar[tuple[str, ...]]
    neighbors: ClassVar[bool] = True
    """True if the observation may be limited to the nearest agents."""

    other_counts: Counter[str]
    """Numbers of the other agents by kind."""

    def __init__(self, observer: Observer) -> None:
        self.options, self.size = observer.options, 0
        self.layout: list[Slot] = []
        # Count the agents of each kind; observations list them by kind.
        self.other_counts = Counter(a.rpartition("_")[0] for a in observer.all_agents)
        if not set(self.other_counts) <= {"adversary", "agent"}:
            self.fail(
                f"expected agents named agent_N or adversary_N, "
                f"got {', '.join(observer.all_agents)}"
            )
        # All agents of a group are of one kind; an agent does not observe itself.
        kinds = {agent.rpartition("_")[0] for agent in observer.agents}
        if len(kinds) > 1:
            self.fail(f"group {observer.group!r} mixes {', '.join(sorted(kinds))}")
        self.other_counts[kinds.pop()] -= 1
        if self.options.get("num_agent_neighbors") is not None and not self.neighbors:
            self.fail(
                "expected num_agent_neighbors=None, because the observation does not "
                "identify adversaries among neighbors; tokenizer=features reads any"
            )
        # Unread numbers mean that the layout is a different one.
        self.parse()
        if self.size != observer.size:
            self.fail(
                f"reads {self.size} numbers in {len(self.layout)} tokens, but group "
                f"{observer.group!r} observes {observer.size}"
            )
        names = self.type_names
        super().__init__(observer, names, self.layout, names, positions=(0, 1))

    @abstractmethod
    def parse(self) -> None:
        """Read the whole observation, and add its tokens."""

    def read(self, count: int) -> list[Places]:
        """Return the indices of the next ``count`` vectors of two numbers."""
        start, self.size = self.size, self.size + 2 * count
        return [(at, at + 1) for at in range(start, self.size, 2)]

    def add(self, type_: str, *, padded: bool = False, **parts: Places) -> None:
        """Add a token with the named parts; the other parts are zero."""
        vectors = [parts.get(part, (None, None)) for part in self.parts]
        self.layout.append(Slot(type_, tuple(chain.from_iterable(vectors)), padded))

    def add_positions(self, type_: str, count: int, present: int | None = None) -> None:
        """Read relative positions, one token each, padding from ``present`` on."""
        for i, place in enumerate(self.read(count)):
            padded = present is not None and i >= present
            self.add(type_, position=place, padded=padded)

    def visible(self, option: str, count: int) -> int:
        """Return the number of vectors in the observation for ``count`` entities.

        An option of partial observability limits it to the nearest entities; missing
        ones are zeros.
        """
        limit: int | None = self.options.get(option)
        return count if limit is None else limit

    def fail(self, reason: str) -> NoReturn:
        """Raise an InputError that names the tokenizer."""
        raise InputError(f"env.tokenizer: {self.name}: {reason}")


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
    def parse(self) -> None:
        num_others = self.other_counts["agent"]
        velocity, position = self.read(2)
        self.add("self", position=position, velocity=velocity)
        landmarks = self.visible("num_landmark_neighbors", num_others + 1)
        self.add_positions("landmark", landmarks, present=num_others + 1)
        visible = self.visible("num_agent_neighbors", num_others)
        places, messages = self.read(visible), self.read(visible)
        for i, (place, message) in enumerate(zip(places, messages, strict=True)):
            padded = i >= num_others
            self.add("agent", position=place, communication=message, padded=padded)


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
    def parse(self) -> None:
        obstacles = self.options.get("num_obstacles", 2)
        velocity, position = self.read(2)
        self.add("self", position=position, velocity=velocity)
        visible = self.visible("num_landmark_neighbors", obstacles)
        self.add_positions("obstacle", visible, present=obstacles)
        self.add_positions("adversary", self.other_counts["adversary"])
        agents = self.other_counts["agent"]
        places, moves = self.read(agents), self.read(agents)
        for place, move in zip(places, moves, strict=True):
            self.add("agent", position=place, velocity=move)
