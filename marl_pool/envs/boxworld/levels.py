"""BoxWorld's levels: fresh ones, drawn in batches, each from its own numbers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.envs.boxworld.codes import (
    AGENT,
    COLORS,
    FLOOR,
    GEM,
    GOAL,
    KEY,
    LOCK,
    LOOSE,
    NOTHING,
    TRAP,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys

MOST_AHEAD = 8
"""Episodes of a world whose levels are drawn ahead, at most."""


class Levels(NamedTuple):
    """A batch of levels; a place is 0 for the held key, then the cells row by row.

    The place after the last cell is for what a level does not have.
    """

    codes: Tensor
    """``(B, n² + 2)`` int64, what each place holds."""
    agent: Tensor
    """``(B,)`` int64, where the agent starts."""
    key: Tensor
    """``(B,)`` int64, where the loose key lies."""
    boxes: Tensor
    """``(B, boxes, 2)`` int64, content and lock of each box, in reading order."""


class LevelGenerator:
    """Draws levels, each from uniform numbers of its own.

    *Colors.* The path is a chain: the loose key opens the box that holds the second
    key, and so on to the gem. A branch begins with a box that a random key of the path
    opens, and is a chain too. Its colors differ from each other and from the path's;
    two branches may share some, as published.

    *Places* are chosen one after another, uniformly among those still legal: the
    boxes, the loose key, the agent. As in Zambaldi et al. (2019), boxes and the key
    touch each other nowhere, not even at corners, so the cells around a box are free.
    Hence what is free is connected and borders on every lock: each level can be solved.
    The agent starts in any free cell, and the key lies in any, also in the last column,
    where the AdaPool paper's published generator never puts it.

    With many boxes, the last may find no place. Then the level begins anew, with the
    next numbers of its own stream; the others don't notice. With default options
    that cannot happen.

    Args:
        n: cells along a side, 3 to 32.
        goal_length: keys and gem on the path, at least 2.
        num_distractors: branches.
        distractor_length: boxes of a branch, at least 1.
        random_distractors: draw the number of branches from 0 to ``num_distractors``.
        device: where the levels are made.

    Raises:
        InputError: more boxes or colors than there is room for.
    """

    def __init__(
        self,
        n: int,
        goal_length: int,
        num_distractors: int,
        distractor_length: int,
        random_distractors: bool,
        device: str | torch.device = "cpu",
    ) -> None:
        self.n, self.path = n, goal_length - 1
        self.branches, self.length = num_distractors, distractor_length
        self.random_distractors = random_distractors
        self.num_boxes = self.path + self.branches * self.length
        self._check_room()
        self._sizes = [
            self.num_boxes + 2,  # places
            self.path,  # its colors
            self.branches,  # which key opens each
            self.branches * self.length,  # their colors
            1,  # how many branches there are
        ]
        self.numbers = sum(self._sizes)
        """How many uniform numbers an attempt takes."""
        self._build_tables(torch.device(device))

    def __call__(self, draw: Callable[[Tensor, int], Tensor], count: int) -> Levels:
        """Draw ``count`` levels.

        Args:
            draw: called with ``(k,)`` numbers of levels and a place in their streams,
                returns the `numbers` uniform numbers there, ``(k, numbers)`` in (0, 1).
            count: how many levels.
        """
        rows = torch.arange(count, device=self._starts.device)
        levels, stuck = self._attempt(draw(rows, 0))
        attempts = 1
        while stuck.any():
            rows = rows[stuck]
            again, stuck = self._attempt(draw(rows, attempts * self.numbers))
            for whole, part in zip(levels, again, strict=True):
                whole[rows] = part
            attempts += 1
        return levels

    def _attempt(self, uniforms: Tensor) -> tuple[Levels, Tensor]:
        """Levels from ``(B, numbers)``; and ``(B,)`` bool, where one found no room."""
        places, path, roots, branches, number = uniforms.split(self._sizes, 1)
        absent = self._absent(number) if self.random_distractors else None
        boxes, key, agent, stuck = self._place(places, absent)
        colors, contents, locks = self._paint(path, roots, branches)
        # The place for what is absent: content and lock fall there and are cleared.
        nowhere = self.n**2 + 1
        if absent is not None:
            boxes = boxes.masked_fill(absent, nowhere)
        beside = (boxes + 1).clamp_(max=nowhere)
        codes = torch.full_like(uniforms[:, :1], FLOOR, dtype=torch.int64)
        codes = codes.repeat(1, nowhere + 1)
        codes.scatter_(1, boxes, contents).scatter_(1, beside, locks)
        codes.scatter_(1, key, colors[:, :1] + LOOSE).scatter_(1, agent, AGENT)
        codes[:, 0] = codes[:, -1] = NOTHING
        if self.num_boxes > 1:
            boxes = boxes.sort(1).values
        beside = (boxes + 1).clamp_(max=nowhere)
        pairs = torch.stack((boxes, beside), 2)
        return Levels(codes, agent[:, 0], key[:, 0], pairs), stuck[:, 0]

    def _place(
        self, uniforms: Tensor, absent: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Places ``(B, boxes)``, ``(B, 1)``, ``(B, 1)``; ``(B, 1)`` where none was."""
        legal = self._starts.repeat(len(uniforms), 1)
        boxes = []
        for i in range(self.num_boxes):
            cell, none = choose(legal, uniforms[:, i : i + 1])
            boxes.append(cell)
            apart = self._box_apart.index_select(0, cell[:, 0])
            legal &= apart if absent is None else apart | absent[:, i : i + 1]
        cells = torch.cat(boxes, 1)
        free = self._around(self._key_apart, cells, absent)
        key, no_key = choose(free, uniforms[:, -2:-1])
        free = self._around(self._outside, cells, absent).scatter_(1, key, False)
        agent, _ = choose(free, uniforms[:, -1:])
        return cells + 1, key + 1, agent + 1, none | no_key

    def _around(self, table: Tensor, cells: Tensor, absent: Tensor | None) -> Tensor:
        """The cells ``(B, n²)`` that ``table`` allows beside every box."""
        allowed = table.index_select(0, cells.flatten()).view(*cells.shape, -1)
        if absent is not None:
            allowed |= absent[..., None]
        return allowed.all(1)

    def _paint(
        self, path: Tensor, roots: Tensor, branches: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The path's colors; the codes of all contents and locks ``(B, boxes)``."""
        free = torch.ones_like(path[:, :1], dtype=torch.bool).repeat(1, COLORS)
        colors = choose_several(free, path)
        gem = torch.full_like(colors[:, :1], GEM)
        contents = [colors[:, 1:] + KEY, gem]
        locks = [colors[:, :-1] + LOCK, colors[:, -1:] + GOAL]
        if self.branches:
            shape = (len(path), self.branches, self.length)
            free = free[:, None].repeat(1, self.branches, 1)
            ends = choose_several(free, branches.view(shape))
            # A float32 may be rounded up to 1.
            which = (roots * self.path).long().clamp_(max=self.path - 1)
            opening = colors.gather(1, which)
            chain = torch.cat((opening[..., None], ends[..., :-1]), 2)
            contents.append(ends.flatten(1) + KEY)
            locks.append(chain.flatten(1) + TRAP)
        return colors, torch.cat(contents, 1), torch.cat(locks, 1)

    def _absent(self, number: Tensor) -> Tensor:
        """Which boxes ``(B, boxes)`` belong to branches that a level lacks."""
        return (number * (self.branches + 1)).long() <= self._branch

    def _check_room(self) -> None:
        most = (self.n + 1) // 2 * ((self.n + 1) // 3) // 2
        if self.num_boxes > most:
            raise InputError(
                f"env.n: expected room for {self.num_boxes} boxes that don't touch "
                f"(goal_length - 1 + num_distractors * distractor_length), got "
                f"{self.n}: at most {most}"
            )
        if self.path + self.length * (self.branches > 0) > COLORS:
            raise InputError(
                f"env.goal_length: expected at most {COLORS} colors for the keys of "
                f"the path and of a branch, got {self.path} + {self.length}"
            )

    def _build_tables(self, device: torch.device) -> None:
        cells = torch.arange(self.n**2, device=device)
        row, column = cells // self.n, cells % self.n
        down = (row - row[:, None]).abs()
        right = column - column[:, None]
        self._starts = column < self.n - 1
        self._box_apart = (down > 1) | (right.abs() > 2)
        self._key_apart = (down > 1) | (right < -1) | (right > 2)
        self._outside = (down > 0) | (right < 0) | (right > 1)
        path = torch.full((self.path,), -1, device=device)
        branch = torch.arange(self.branches, device=device)
        self._branch = torch.cat((path, branch.repeat_interleave(self.length)))


class LevelStock:
    """Levels of each world's next episodes, drawn ahead.

    A few levels cost as much as a hundred, and in each step a few episodes may end.
    What comes out does not depend on how many are drawn ahead.

    Args:
        generator: of the levels.
        draw: from ``(k,)`` int64 stream keys, a count and a place, the ``(k, count)``
            uniform numbers of these streams from there on.
        seed: of the run.
        worlds: ``(num_envs,)`` int64 world numbers.
    """

    def __init__(
        self,
        generator: LevelGenerator,
        draw: Callable[[Tensor, int, int], Tensor],
        seed: int,
        worlds: Tensor,
    ) -> None:
        self.generator, self.draw = generator, draw
        self.seed, self.env_ids = seed, worlds
        self._ahead = 0
        self._first = torch.zeros_like(worlds)
        self._levels: Levels | None = None

    def select(self, rows: Tensor, episodes: Tensor) -> Levels:
        """The levels of the worlds ``rows``, ``(k,)``, which begin a new episode.

        Args:
            rows: which worlds.
            episodes: ``(num_envs,)`` the episode that each world is in now.
        """
        place = episodes[rows] - self._first[rows]
        if self._levels is None or bool(((place < 0) | (place >= self._ahead)).any()):
            self._levels = self._draw_ahead(rows, episodes)
            place = torch.zeros_like(rows)
        place = place + rows * self._ahead
        return Levels(*(part.index_select(0, place) for part in self._levels))

    def _draw_ahead(self, rows: Tensor, episodes: Tensor) -> Levels:
        # Twice as many as the last time: whoever plays one episode pays for one.
        self._ahead = min(max(1, 2 * self._ahead), MOST_AHEAD)
        self._first = (episodes + 1).index_copy(0, rows, episodes[rows])
        later = torch.arange(self._ahead, device=rows.device)
        numbers = (self._first[:, None] + later).flatten()
        worlds = self.env_ids.repeat_interleave(self._ahead)
        keys = stream_keys(self.seed, worlds, numbers, Purpose.RESET)

        def draw(levels: Tensor, start: int) -> Tensor:
            return self.draw(keys[levels], self.generator.numbers, start)

        return self.generator(draw, len(keys))


def choose(legal: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Choose uniformly among what is legal.

    Args:
        legal: ``(*B, M)`` bool.
        uniforms: ``(*B, 1)`` in (0, 1].

    Returns:
        ``(*B, 1)`` int64 places, 0 where nothing is legal; ``(*B, 1)`` bool, where.
    """
    counts = legal.cumsum(-1)
    total = counts[..., -1:]
    return (counts < uniforms * total).sum(-1, keepdim=True), total == 0


def choose_several(legal: Tensor, uniforms: Tensor) -> Tensor:
    """Choose k different places ``(*B, k)``, for each of ``uniforms`` ``(*B, k)``.

    What is chosen is no longer legal afterwards: ``legal`` is written into.
    """
    chosen = []
    for i in range(uniforms.shape[-1]):
        place, _ = choose(legal, uniforms[..., i : i + 1])
        legal.scatter_(-1, place, False)
        chosen.append(place)
    return torch.cat(chosen, -1)
