"""The ceiling of BoxWorld: a solver that reads the room off the tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_pool.envs.boxworld.codes import TYPE_NAMES
from marl_pool.envs.boxworld.world import MOVES, BoxWorldGroup
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

KEY, LOCK = TYPE_NAMES.index("key"), TYPE_NAMES.index("lock")
GEM, HELD = TYPE_NAMES.index("gem"), TYPE_NAMES.index("held")
NO_COLOR = -1
FAR = 1 << 20


class Map(NamedTuple):
    """The surroundings of agents, who stand in the middle of a square.

    The square reaches n cells to each side, so that it holds the whole room wherever
    the agent stands. Its cells are counted row by row.
    """

    items: Tensor
    """``(B, cells)`` int64, colors of keys and gems, `NO_COLOR` elsewhere."""
    locks: Tensor
    """``(B, cells)`` int64, colors of locks."""
    gem: Tensor
    """``(B, 1)`` int64, the gem's cell, or the middle where there is none."""
    held: Tensor
    """``(B, 1)`` int64, color of the held key."""
    inside: Tensor
    """``(B, cells)`` bool, surely within the walls."""


class BoxWorldHeuristic(Policy):
    """Take the shortest way to the gem, by what the tokens show.

    From the gem it goes back along the chain of boxes: which key opens this box, in
    which box is that key, until a box that the held key opens or the loose key. That
    cell is the next goal; distractors never are. Each goal of the chain is one cell and
    must be reached before the next, so the shortest way to each is the shortest way to
    the gem.

    It remembers nothing and trusts what it sees: positions are rounded to cells, and
    what is padded is taken for floor. Without a gem in sight it walks into some wall.

    Pixels show the whole room. Entities show no walls: before it holds a key, the
    agent keeps to the smallest rectangle around all that it sees, and leaves it only
    if there is no way within. It may then push against a wall for ever. Holding a key,
    it knows where the walls are, since the held key shows in their corner.

    Args:
        group: the agents' group, for the size of the room.
    """

    def __init__(self, group: BoxWorldGroup) -> None:
        super().__init__()
        self.n = group.n
        self.side = 2 * group.n + 1
        self.config: dict[str, Any] = {}

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide; ``logits`` are minus the steps left from each side. See `Policy`."""
        steps = self.steps_left(tokens.flatten_batch())
        logits = -steps.view(*tokens.batch_shape, len(MOVES)).to(torch.float32)
        none = torch.zeros(tokens.batch_shape, device=logits.device)
        return Decision(logits.argmax(-1), none, none, logits, state)

    def steps_left(self, tokens: Tokens) -> Tensor:
        """From the cells up, down, left, right of agents, the steps to the next goal.

        Args:
            tokens: of batch ``(B,)``.

        Returns:
            ``(B, 4)`` int64, `FAR` where there is no way.
        """
        seen = self.read(tokens)
        goal = self.next_goal(seen)
        barred = (seen.items != NO_COLOR) | (seen.locks != NO_COLOR)
        barred.scatter_(1, goal, False)
        steps = self.distances(seen.inside & ~barred, goal)
        lost = (steps.min(1).values >= FAR).nonzero()[:, 0]
        if len(lost):
            steps[lost] = self.distances(~barred[lost], goal[lost])
        return steps

    def read(self, tokens: Tokens) -> Map:
        """Draw a map of what tokens of batch ``(B,)`` show."""
        cells, far = self.side**2, self.side // 2
        features = torch.where(tokens.padding[..., None], 0.0, tokens.features)
        features = features.nan_to_num(0.0, 0.0, 0.0)
        away = (features[..., 3:] * (self.n + 1)).round().long().clamp(-far, far)
        place = (away[..., 0] + far) * self.side + away[..., 1] + far
        parts = (features[..., :3] * 255).round().long().clamp(0, 255)
        color = (parts[..., 0] * 256 + parts[..., 1]) * 256 + parts[..., 2]
        types = tokens.types.masked_fill(tokens.padding, -1)
        held = types == HELD
        # A cell more takes what is not to be drawn.
        blank = color.new_full((len(color), cells + 1), NO_COLOR)

        def draw(shown: Tensor) -> Tensor:
            where = place.masked_fill(~shown, cells)
            return blank.scatter(1, where, color)[:, :cells]

        gem = torch.where(types == GEM, place, -1).max(1, keepdim=True).values
        return Map(
            draw((types == KEY) | (types == GEM)),
            draw(types == LOCK),
            torch.where(gem < 0, cells // 2, gem),
            color.masked_fill(~held, NO_COLOR).max(1, keepdim=True).values,
            self._inside(away, (types >= 0) & ~held, held),
        )

    def next_goal(self, seen: Map) -> Tensor:
        """The cell ``(B, 1)`` that is to be walked onto next: a lock or a loose key."""
        beside = torch.nn.functional.pad(seen.locks[:, 1:], (0, 1), value=NO_COLOR)
        item = seen.gem
        goal = item
        # As often as there may be boxes; a chain that loops, in noise, ends too.
        for _ in range(self.n**2 // 2):
            lock = beside.gather(1, item)
            loose = lock == NO_COLOR
            goal = torch.where(loose, item, item + 1)
            opening = seen.items == lock
            done = loose | (lock == seen.held) | ~opening.any(1, keepdim=True)
            if done.all():
                break
            key = opening.long().argmax(1, keepdim=True)
            item = torch.where(done, item, key)
        return goal

    def distances(self, free: Tensor, goal: Tensor) -> Tensor:
        """Steps ``(B, 4)`` to the goal, from each side of the middle.

        Args:
            free: ``(B, cells)`` bool, where an agent can walk.
            goal: ``(B, 1)`` its cell, which is free.
        """
        shape = (-1, self.side, self.side)
        reached = torch.zeros_like(free).scatter_(1, goal, True).view(shape)
        unknown = free.view(shape) & ~reached
        steps = torch.where(reached, 0, FAR)
        passed = 0
        while reached.any():
            passed += 1
            reached = _beside(reached) & unknown
            unknown &= ~reached
            steps.masked_fill_(reached, passed)
        middle = self.side // 2
        around = [steps[:, middle + down, middle + right] for down, right in MOVES]
        return torch.stack(around, 1)

    def _inside(self, away: Tensor, shown: Tensor, held: Tensor) -> Tensor:
        """The rectangle ``(B, cells)`` of what is shown; the room, if a key is held."""
        far = self.side // 2
        line = torch.arange(-far, far + 1, device=away.device)
        within = []
        for axis in range(2):
            at = away[..., axis]
            low = torch.where(shown, at, far).min(1, keepdim=True).values
            high = torch.where(shown, at, -far).max(1, keepdim=True).values
            wall = torch.where(held, at, -2 * far).max(1, keepdim=True).values
            known = held.any(1, keepdim=True)
            low = torch.where(known, wall + 1, low)
            high = torch.where(known, wall + self.n, high)
            within.append((line >= low) & (line <= high))
        rows, columns = within
        return (rows[:, :, None] & columns[:, None]).flatten(1)


def _beside(cells: Tensor) -> Tensor:
    """The neighbors, up, down, left and right, of cells ``(B, side, side)`` bool."""
    beside = torch.zeros_like(cells)
    beside[:, 1:] |= cells[:, :-1]
    beside[:, :-1] |= cells[:, 1:]
    beside[:, :, 1:] |= cells[:, :, :-1]
    beside[:, :, :-1] |= cells[:, :, 1:]
    return beside
