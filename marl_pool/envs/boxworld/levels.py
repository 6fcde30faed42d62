"""Random generation of BoxWorld levels, in batches."""

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
from marl_pool.utils.devices import may_read
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys

MOST_AHEAD = 8
"""Largest number of episodes whose levels are sampled ahead."""


class Levels(NamedTuple):
    """A batch of levels, in int64.

    Place 0 is the held key; then come the cells row by row, and one last place for
    boxes that a level lacks.
    """

    codes: Tensor
    """``(B, n² + 2)``, the code of each place."""
    agent: Tensor
    """``(B,)``, the initial place of the agent."""
    key: Tensor
    """``(B,)``, the place of the loose key."""
    boxes: Tensor
    """``(B, boxes, 2)``, places of content and lock, in reading order."""


class LevelGenerator:
    """Sampler of levels, each from a separate stream of uniform numbers.

    *Colors.* The path is a chain: the loose key opens the box that holds the second
    key, and so on to the gem. A branch begins with a box that a random key of the path
    opens, and is a chain too. Its colors differ from each other and from the path's;
    two branches may have colors in common, as published.

    *Places* are sampled in order, uniformly among the legal ones: the boxes, the loose
    key, the agent. As in `Zambaldi et al. (2019) <https://arxiv.org/abs/1806.01830>`_,
    boxes and the key do not touch each other, not even at corners, so the cells around
    a box are free. Hence the free cells are connected and border on every lock, and
    each level can be solved. Agent and key start in any free cell; the published
    generator of AdaPool never puts the key in the last column.

    With many boxes, the last ones may have no legal place. Such a level is sampled
    again from the next numbers of its stream, so other levels do not change. This
    cannot happen with the default options, nor wherever `has_room` is True.

    The arguments are options of `BoxWorld`.

    Raises:
        InputError: more boxes or colors than fit.
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
        # Counts of the uniform numbers that each part of a level consumes.
        self._sizes = [
            self.num_boxes + 2,  # places
            self.path,  # its colors
            self.branches,  # which key opens each
            self.branches * self.length,  # their colors
            1,  # how many branches there are
        ]
        self.numbers = sum(self._sizes)
        """Number of uniform numbers of one attempt."""
        # A box excludes 3 × 5 places of other boxes, and 3 × 4 of the key.
        self.has_room = (
            15 * (self.num_boxes - 1) < n * (n - 1) and 12 * self.num_boxes < n * n
        )
        """True if every attempt succeeds, whatever its numbers."""
        self._build_tables(torch.device(device))

    def __call__(self, sample: Callable[[Tensor, int], Tensor], count: int) -> Levels:
        """Sample ``count`` levels.

        ``sample`` returns ``(k, numbers)`` uniform numbers for the levels ``(k,)``,
        from a position in their streams.
        """
        rows = torch.arange(count, device=self._starts.device)
        levels, stuck = self._attempt(sample(rows, 0))
        if self.has_room:
            return levels
        attempts = 1
        # Resample only the levels in which a box or the key had no legal place.
        while stuck.any():
            rows = rows[stuck]
            again, stuck = self._attempt(sample(rows, attempts * self.numbers))
            for whole, part in zip(levels, again, strict=True):
                whole[rows] = part
            attempts += 1
        return levels

    def _attempt(self, uniforms: Tensor) -> tuple[Levels, Tensor]:
        """Build levels from ``(B, numbers)``; return a mask ``(B,)`` of failures."""
        # Each part of a level has separate numbers, whatever the others need.
        places, path, roots, branches, number = uniforms.split(self._sizes, 1)
        absent = None
        if self.random_distractors:
            # Boxes on branches that the level lacks.
            absent = (number * (self.branches + 1)).long() <= self._branch
        boxes, key, agent, stuck = self._place(places, absent)
        colors, contents, locks = self._paint(path, roots, branches)
        # Absent boxes go to the last place, which is cleared below.
        nowhere = self.n**2 + 1
        if absent is not None:
            boxes = boxes.masked_fill(absent, nowhere)
        beside = (boxes + 1).clamp_(max=nowhere)
        # Write the codes into the grid: contents, locks, key and agent.
        codes = torch.full_like(uniforms[:, :1], FLOOR, dtype=torch.int64)
        codes = codes.repeat(1, nowhere + 1)
        codes.scatter_(1, boxes, contents).scatter_(1, beside, locks)
        codes.scatter_(1, key, colors[:, :1] + LOOSE).scatter_(1, agent, AGENT)
        codes[:, 0] = codes[:, -1] = NOTHING
        # Sort the boxes, so that their order tells nothing about the path.
        if self.num_boxes > 1:
            boxes = boxes.sort(1).values
        pairs = torch.stack((boxes, (boxes + 1).clamp_(max=nowhere)), 2)
        return Levels(codes, agent[:, 0], key[:, 0], pairs), stuck[:, 0]

    def _place(
        self, uniforms: Tensor, absent: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample the places of boxes, key and agent; return a mask of failures too."""
        # Place the boxes one by one; each excludes the cells around it.
        legal = self._starts.repeat(len(uniforms), 1)
        boxes = []
        for i in range(self.num_boxes):
            cell, none = choose(legal, uniforms[:, i : i + 1])
            boxes.append(cell)
            apart = self._box_apart.index_select(0, cell[:, 0])
            legal &= apart if absent is None else apart | absent[:, i : i + 1]
        cells = torch.cat(boxes, 1)
        # The key keeps a distance to boxes, the agent may stand next to them.
        free = self._around(self._key_apart, cells, absent)
        key, no_key = choose(free, uniforms[:, -2:-1])
        free = self._around(self._outside, cells, absent).scatter_(1, key, False)
        agent, _ = choose(free, uniforms[:, -1:])
        return cells + 1, key + 1, agent + 1, none | no_key

    def _around(self, table: Tensor, cells: Tensor, absent: Tensor | None) -> Tensor:
        """Return the cells ``(B, n²)`` that ``table`` allows next to every box."""
        allowed = table.index_select(0, cells.flatten()).view(*cells.shape, -1)
        if absent is not None:
            allowed |= absent[..., None]
        return allowed.all(1)

    def _paint(
        self, path: Tensor, roots: Tensor, branches: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the colors of the path, and the codes of all contents and locks."""
        # Each box on the path holds the key of the next one, the last the gem.
        free = torch.ones_like(path[:, :1], dtype=torch.bool).repeat(1, COLORS)
        colors = choose_several(free, path)
        gem = torch.full_like(colors[:, :1], GEM)
        contents = [colors[:, 1:] + KEY, gem]
        locks = [colors[:, :-1] + LOCK, colors[:, -1:] + GOAL]
        if self.branches:
            # Each branch starts with a lock of a random color of the path.
            shape = (len(path), self.branches, self.length)
            free = free[:, None].repeat(1, self.branches, 1)
            ends = choose_several(free, branches.view(shape))
            # A float32 uniform number may be rounded up to 1.
            root_index = (roots * self.path).long().clamp_(max=self.path - 1)
            opening = colors.gather(1, root_index)
            chain = torch.cat((opening[..., None], ends[..., :-1]), 2)
            contents.append(ends.flatten(1) + KEY)
            locks.append(chain.flatten(1) + TRAP)
        return colors, torch.cat(contents, 1), torch.cat(locks, 1)

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
    """Levels of the next episodes of each environment, sampled ahead.

    Sampling a few levels costs as much as sampling a hundred, and in each step a few
    episodes may end. The levels do not depend on the number that is sampled ahead.
    ``sample`` is `BatchedEnv.sample_uniform`.
    """

    def __init__(
        self,
        generator: LevelGenerator,
        sample: Callable[[Tensor, int, int], Tensor],
        seed: int,
        env_ids: Tensor,
    ) -> None:
        self.generator, self.sample = generator, sample
        self.seed, self.env_ids = seed, env_ids
        self._ahead = 0
        # Number of selections for which the levels suffice, whichever episodes end.
        self._lasts = 0
        self._first = torch.zeros_like(env_ids)
        self._levels: Levels | None = None

    def select(self, rows: Tensor, episodes: Tensor) -> Levels:
        """Return the levels of the environments ``rows`` ``(k,)`` in their episodes."""
        if may_read(episodes):
            self._lasts = 0
            place = episodes[rows] - self._first[rows]
            stale = (place < 0) | (place >= self._ahead)
            if self._levels is None or bool(stale.any()):
                self._levels = self._sample_ahead(rows, episodes)
                place = torch.zeros_like(rows)
        else:
            # The rows are all environments, and each of them begins one episode at most
            # between two selections.
            if self._lasts == 0:
                self._levels = self._sample_ahead(rows, episodes)
                self._lasts = self._ahead
            self._lasts -= 1
            place = episodes - self._first
        assert self._levels is not None
        places = place + rows * self._ahead
        return Levels(*(part.index_select(0, places) for part in self._levels))

    def _sample_ahead(self, rows: Tensor, episodes: Tensor) -> Levels:
        # Double the number each time, so that a single episode costs a single level.
        self._ahead = min(max(1, 2 * self._ahead), MOST_AHEAD)
        self._first = (episodes + 1).index_copy(0, rows, episodes[rows])
        later = torch.arange(self._ahead, device=rows.device)
        numbers = (self._first[:, None] + later).flatten()
        env_ids = self.env_ids[:, None].expand(-1, self._ahead).flatten()
        keys = stream_keys(self.seed, env_ids, numbers, Purpose.RESET)

        def sample(levels: Tensor, start: int) -> Tensor:
            return self.sample(keys[levels], self.generator.numbers, start)

        return self.generator(sample, len(keys))


def choose(legal: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample uniformly among the ``legal`` places ``(*B, M)``.

    Returns:
        ``(*B, 1)`` int64 places, 0 where none is legal, and ``(*B, 1)`` bool, True
        there.
    """
    counts = legal.cumsum(-1)
    total = counts[..., -1:]
    return (counts < uniforms * total).sum(-1, keepdim=True), total == 0


def choose_several(legal: Tensor, uniforms: Tensor) -> Tensor:
    """Sample k different places ``(*B, k)`` by ``uniforms`` ``(*B, k)``.

    The chosen places are removed from ``legal`` in place.
    """
    places = []
    for i in range(uniforms.shape[-1]):
        place, _ = choose(legal, uniforms[..., i : i + 1])
        legal.scatter_(-1, place, False)
        places.append(place)
    return torch.cat(places, -1)
