"""Reference policy of BoxWorld: a solver that reads the room from its tokens."""

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.boxworld.codes import TYPE_NAMES
from marl_pool.envs.boxworld.env import MOVES, BoxWorldGroup
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import Tokens

KEY, LOCK = TYPE_NAMES.index("key"), TYPE_NAMES.index("lock")
GEM, HELD = TYPE_NAMES.index("gem"), TYPE_NAMES.index("held")
NO_COLOR = -1
FAR = 1 << 20


class Map(NamedTuple):
    """Square maps centred on the agents, with cells numbered row by row.

    A map extends n cells to each side, so that it contains the whole room for any
    position of the agent.
    """

    items: Tensor
    """``(B, cells)`` int64, colors of keys and gems, `NO_COLOR` elsewhere."""
    locks: Tensor
    """``(B, cells)`` int64, colors of locks."""
    gem: Tensor
    """``(B, 1)`` int64, the gem's cell, or the middle if there is no gem."""
    held: Tensor
    """``(B, 1)`` int64, color of the held key."""
    inside: Tensor
    """``(B, cells)`` bool, True for cells known to be inside the walls."""


class BoxWorldHeuristic(Heuristic):
    """Take the shortest way to the gem.

    The search starts at the gem and follows the chain of boxes back: from a box to the
    box that contains its key, until a box that the held key opens, or the loose key.
    That cell is the next goal. The goals must be reached in order, so the shortest way
    to each of them is the shortest way to the gem.

    The policy has no memory and does not filter noise: positions are rounded to cells,
    and padded tokens count as floor. Without a gem token it walks into a wall.

    Pixels contain the whole room. Entities contain no walls: before the agent holds a
    key, it stays in the smallest rectangle around all tokens and leaves it only if that
    contains no path; then it may push against a wall forever. The token of a held key
    is at the corner of the walls and so determines their position. `Decision.logits`
    are minus the steps left after each action.

    Args:
        group: the group of agents, with the size of the room.
    """

    def __init__(self, group: BoxWorldGroup) -> None:
        super().__init__()
        self.n, self.side = group.n, 2 * group.n + 1

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        steps = self.steps_left(tokens.flatten_batch())
        logits = -steps.view(*tokens.batch_shape, len(MOVES)).to(torch.float32)
        return logits.argmax(-1), logits

    def steps_left(self, tokens: Tokens) -> Tensor:
        """Compute the steps ``(B, 4)`` to the next goal after each move, or `FAR`."""
        room_map = self.read(tokens)
        # All boxes but the goal are obstacles.
        goal = self.next_goal(room_map)
        barred = (room_map.items != NO_COLOR) | (room_map.locks != NO_COLOR)
        barred.scatter_(1, goal, False)
        steps = self.distances(room_map.inside & ~barred, goal)
        # Without a way inside the known room, search beyond it.
        lost = (steps.min(1).values >= FAR).nonzero()[:, 0]
        if len(lost):
            steps[lost] = self.distances(~barred[lost], goal[lost])
        return steps

    def read(self, tokens: Tokens) -> Map:
        """Build the maps of tokens with batch dimension ``(B,)``."""
        cells, far = self.side**2, self.side // 2
        # Positions and colors become integers, which ignores small noise.
        features = torch.where(tokens.padding[..., None], 0.0, tokens.features)
        features = features.nan_to_num(0.0, 0.0, 0.0)
        away = (features[..., 3:] * (self.n + 1)).round().long().clamp(-far, far)
        place = (away[..., 0] + far) * self.side + away[..., 1] + far
        parts = (features[..., :3] * 255).round().long().clamp(0, 255)
        color = (parts[..., 0] * 256 + parts[..., 1]) * 256 + parts[..., 2]
        # Padding has no type.
        types = tokens.types.masked_fill(tokens.padding, -1)
        held = types == HELD
        # One extra cell receives the tokens that are not on this map.
        blank = color.new_full((len(color), cells + 1), NO_COLOR)

        def mark(visible: Tensor) -> Tensor:
            where = place.masked_fill(~visible, cells)
            return blank.scatter(1, where, color)[:, :cells]

        # Without a gem, take the middle, which no walk can improve.
        gem = torch.where(types == GEM, place, -1).max(1, keepdim=True).values
        return Map(
            mark((types == KEY) | (types == GEM)),
            mark(types == LOCK),
            torch.where(gem < 0, cells // 2, gem),
            color.masked_fill(~held, NO_COLOR).max(1, keepdim=True).values,
            self._inside(away, (types >= 0) & ~held, held),
        )

    def next_goal(self, room_map: Map) -> Tensor:
        """Return the cell ``(B, 1)`` to walk onto next: a lock or the loose key."""
        # The lock of a box lies on the right of its content.
        beside = torch.nn.functional.pad(room_map.locks[:, 1:], (0, 1), value=NO_COLOR)
        item = room_map.gem
        goal = item
        # Bounded by the number of boxes, because noise can make the chain a loop.
        for _ in range(self.n**2 // 2):
            lock = beside.gather(1, item)
            loose = lock == NO_COLOR
            goal = torch.where(loose, item, item + 1)
            opening = room_map.items == lock
            done = loose | (lock == room_map.held) | ~opening.any(1, keepdim=True)
            if done.all():
                break
            # Continue with the key that opens this lock.
            key = opening.long().argmax(1, keepdim=True)
            item = torch.where(done, item, key)
        return goal

    def distances(self, free: Tensor, goal: Tensor) -> Tensor:
        """Compute the steps ``(B, 4)`` to the goal from the cells around the agent.

        Args:
            free: ``(B, cells)`` bool, True where an agent can walk.
            goal: ``(B, 1)`` cell of the goal, which must be free.
        """
        shape = (-1, self.side, self.side)
        reached = torch.zeros_like(free).scatter_(1, goal, True).view(shape)
        unknown = free.view(shape) & ~reached
        steps = torch.where(reached, 0, FAR)
        # Breadth-first search from the goal.
        distance = 0
        while reached.any():
            distance += 1
            reached = _beside(reached) & unknown
            unknown &= ~reached
            steps.masked_fill_(reached, distance)
        # Read the steps at the agent's four neighbors.
        middle = self.side // 2
        around = [steps[:, middle + down, middle + right] for down, right in MOVES]
        return torch.stack(around, 1)

    def _inside(self, away: Tensor, visible: Tensor, held: Tensor) -> Tensor:
        """Return the cells of the room if known, else a rectangle around all tokens."""
        far = self.side // 2
        line = torch.arange(-far, far + 1, device=away.device)
        within = []
        for axis in range(2):
            at = away[..., axis]
            # The extent of all tokens, in case no wall is seen.
            low = torch.where(visible, at, far).min(1, keepdim=True).values
            high = torch.where(visible, at, -far).max(1, keepdim=True).values
            # The held key lies on the wall and shows where the room begins.
            wall = torch.where(held, at, -2 * far).max(1, keepdim=True).values
            is_held = held.any(1, keepdim=True)
            low = torch.where(is_held, wall + 1, low)
            high = torch.where(is_held, wall + self.n, high)
            within.append((line >= low) & (line <= high))
        rows, columns = within
        return (rows[:, :, None] & columns[:, None]).flatten(1)


def _beside(cells: Tensor) -> Tensor:
    """Return the four neighbors of cells ``(B, side, side)`` bool."""
    beside = torch.zeros_like(cells)
    beside[:, 1:] |= cells[:, :-1]
    beside[:, :-1] |= cells[:, 1:]
    beside[:, :, 1:] |= cells[:, :, :-1]
    beside[:, :, :-1] |= cells[:, :, 1:]
    return beside
