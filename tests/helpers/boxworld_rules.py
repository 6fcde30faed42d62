"""BoxWorld's rules in plain Python, one level at a time: the tests' oracle.

The environment's codes are used only to read and to write a level.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from marl_pool.envs.boxworld.codes import (
    AGENT,
    COLORS,
    FLOOR,
    GEM,
    GOAL,
    KEY,
    KEY_COLORS,
    LOCK,
    LOOSE,
    NOTHING,
    TRAP,
)
from marl_pool.envs.boxworld.env import BoxWorld

Cell = tuple[int, int]
"""Row and column, from 1 to n; (0, 0) is the corner of the wall."""
WHITE, GREY, LIGHT = (255, 255, 255), (128, 128, 128), (220, 220, 220)
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))


@dataclass(frozen=True)
class Box:
    """A box: its content in one cell, its lock in the cell to the right."""

    cell: Cell
    content: str  # a color's number, or "gem"
    lock: str
    trap: bool

    @property
    def lock_cell(self) -> Cell:
        return self.cell[0], self.cell[1] + 1


@dataclass(frozen=True)
class Level:
    """The state of a level at one step of an episode."""

    n: int
    agent: Cell
    loose: tuple[Cell, str] | None
    held: str | None
    boxes: frozenset[Box] = field(default_factory=frozenset)

    def act(self, action: int) -> tuple["Level", float, bool]:
        """Move; return the new level, the reward, and whether the episode ended."""
        down, right = STEPS[action]
        cell = (self.agent[0] + down, self.agent[1] + right)
        if not (1 <= cell[0] <= self.n and 1 <= cell[1] <= self.n):
            return self, 0.0, False
        if self.loose is not None and cell == self.loose[0]:
            return replace(self, agent=cell, loose=None, held=self.loose[1]), 1.0, False
        for box in self.boxes:
            if cell == box.cell or (cell == box.lock_cell and box.lock != self.held):
                return self, 0.0, False
            if cell == box.lock_cell:
                boxes = self.boxes - {box}
                after = replace(self, agent=cell, held=box.content, boxes=boxes)
                if box.trap:
                    return after, -1.0, True
                gem = box.content == "gem"
                return after, 10.0 if gem else 1.0, gem
        return replace(self, agent=cell), 0.0, False

    def entities(self) -> list[tuple[str, tuple[int, int, int], Cell]]:
        """List each entity: type, color, cell."""
        entities = [("self", GREY, self.agent)]
        if self.loose is not None:
            entities.append(("key", rgb(self.loose[1]), self.loose[0]))
        if self.held is not None:
            entities.append(("held", rgb(self.held), (0, 0)))
        for box in self.boxes:
            kind = "gem" if box.content == "gem" else "key"
            entities.append((kind, rgb(box.content), box.cell))
            entities.append(("lock", rgb(box.lock), box.lock_cell))
        return entities

    def pixels(self) -> list[tuple[str, tuple[int, int, int], Cell]]:
        """List each entity, and the floor of every other cell."""
        items = self.entities()
        covered = {cell for _, _, cell in items}
        cells = [(r, c) for r in range(1, self.n + 1) for c in range(1, self.n + 1)]
        return items + [("floor", LIGHT, cell) for cell in cells if cell not in covered]

    def shortest(self) -> int | None:
        """Return the fewest steps to the gem, by breadth-first search, or None."""
        visited, queue = {self}, deque([(self, 0)])
        while queue:
            level, steps = queue.popleft()
            for action in range(4):
                after, reward, end = level.act(action)
                if reward == 10:
                    return steps + 1
                if not end and after not in visited:
                    visited.add(after)
                    queue.append((after, steps + 1))
        return None


def rgb(name: str) -> tuple[int, int, int]:
    return WHITE if name == "gem" else KEY_COLORS[int(name)]


def read(env: BoxWorld, index: int = 0) -> Level:
    """Return the initial level of environment ``index``."""
    codes = env.codes[index].tolist()
    assert codes[0] == codes[-1] == NOTHING
    agent = loose = None
    boxes = set()
    for place, code in enumerate(codes[1:-1], 1):
        row, column = divmod(place - 1, env.n)
        cell = (row + 1, column + 1)
        if code == AGENT:
            assert agent is None
            agent = cell
        elif LOOSE <= code < LOCK:
            assert loose is None
            loose = (cell, str(code - LOOSE))
        elif code == GEM or KEY <= code < KEY + COLORS:
            assert column + 1 < env.n
            lock = codes[place + 1]
            assert lock >= LOCK
            assert (GOAL <= lock < TRAP) == (code == GEM)
            content = "gem" if code == GEM else str(code - KEY)
            name = str((lock - LOCK) % COLORS)
            boxes.add(Box(cell, content, name, trap=lock >= TRAP))
        else:
            assert code == FLOOR or code >= LOCK
    assert agent is not None
    assert sum(code >= LOCK for code in codes) == len(boxes)
    return Level(env.n, agent, loose, None, frozenset(boxes))


def write(level: Level, **options: Any) -> BoxWorld:
    """Make a batch of one environment that starts with ``level``."""
    env = BoxWorld(1, n=level.n, **options)
    env.reset()
    env.codes.fill_(FLOOR)
    env.codes[:, 0] = env.codes[:, -1] = NOTHING

    def put(cell: Cell, code: int) -> int:
        place = 1 + (cell[0] - 1) * level.n + cell[1] - 1
        env.codes[0, place] = code
        return place

    places = [put(level.agent, AGENT)]
    if level.loose is not None:
        places.append(put(level.loose[0], LOOSE + int(level.loose[1])))
    for box in sorted(level.boxes, key=lambda box: box.cell):
        gem = box.content == "gem"
        places.append(put(box.cell, GEM if gem else KEY + int(box.content)))
        kind = TRAP if box.trap else GOAL if gem else LOCK
        places.append(put(box.lock_cell, kind + int(box.lock)))
    num_places = env.places.shape[1]
    env.places[0] = torch.tensor(places[:num_places])
    return env


def draw(text: str, *traps: str) -> Level:
    """Parse a level drawn in letters.

    ``@`` is the agent, a lowercase letter a key, ``*`` the gem, and an uppercase letter
    the lock of that letter's color. A key is loose unless there is a lock to its right.
    The keys named in ``traps`` are in distractor boxes.
    """
    rows = text.split()
    agent = loose = None
    boxes = set()
    for r, row in enumerate(rows, 1):
        assert len(row) == len(rows)
        for c, letter in enumerate(row, 1):
            following = row[c] if c < len(row) else "."
            if letter == "@":
                agent = (r, c)
            elif letter == "*" or letter.islower():
                name = "gem" if letter == "*" else str(ord(letter) - ord("a"))
                if following.isupper():
                    lock = str(ord(following) - ord("A"))
                    boxes.add(Box((r, c), name, lock, letter in traps))
                else:
                    loose = ((r, c), name)
    assert agent is not None
    return Level(len(rows), agent, loose, None, frozenset(boxes))
