"""A scripted Pong player that reads ball and paddle from the pixels."""

import math
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.base import Group
from marl_pool.envs.pong_simulator import SCREEN
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.randomness import Stream
from marl_pool.tokens import Tokens

BACKGROUND = 87
"""Grey level of the field; ball and paddles are lighter."""
MARGIN = 8
"""How many levels lighter a pixel has to be in order to count."""
FIELD = slice(14, 77)
"""Rows of the field, in pixels of a frame."""
BALL_COLUMNS = slice(12, 72)
"""Between the paddles."""
PADDLE_COLUMNS = slice(73, 76)
HIT = 72.5
"""The column at which the ball meets the paddle."""
WALLS = (14.5, 75.5)
"""Rows between which the centre of the ball is reflected."""
MIDDLE = 45.0
"""The row where the paddle waits."""
SLOWEST = 0.3
"""Pixels a step below which a ball is not taken to approach."""
FARTHEST = 60.0
"""Steps that the prediction looks ahead at most."""
UP_AND_DOWN = {3: (1, 2), 6: (2, 3)}
"""The two actions, by how many there are."""


class Seen(NamedTuple):
    """Where something light is; each ``(*B,)``."""

    column: Tensor
    row: Tensor
    present: Tensor
    """bool; the other two mean nothing where it is False."""


class PongHeuristic(Policy):
    r"""Go to where the ball will cross, judging by the last two frames.

    A ball at column x and row y that moves by (u, v) pixels a step crosses the
    paddle's column h at the row

    .. math:: y + (h - x)\, v / u

    reflected at the walls. The paddle is pressed towards it when its centre, with its
    own last motion added since it has inertia, is more than ``dead_zone`` away. While
    the ball moves away or is not seen, the paddle goes to the middle. What a stroke
    will lead to is not considered, so it is no ceiling and hardly an opponent. Without
    sticky actions all depends on the start: some of the 31 are lost 0 : 21 in some 760
    steps, from most it gets a few points ahead in long rallies, and no game that was
    watched was won within 1500 steps. With sticky actions it loses. A stronger
    teacher is `ValueTableTeacher`, which reads the console's memory.

    The patches are put together by their order: under a shuffle it sees nonsense.
    Missing patches show it an empty field.

    Args:
        group: the agents' group, for its patches and actions.
        offset: pixels below the crossing at which the paddle's centre aims, so that
            the ball comes off at an angle.
        dead_zone: pixels.
    """

    def __init__(
        self, group: Group, offset: float = -2.0, dead_zone: float = 1.5
    ) -> None:
        super().__init__()
        assert isinstance(group.action_space, spaces.Discrete)
        self.up, self.down = UP_AND_DOWN[int(group.action_space.n)]
        self.side = math.isqrt(group.tokens.num_tokens)
        self.offset, self.dead_zone = offset, dead_zone
        self.config: dict[str, Any] = {"offset": offset, "dead_zone": dead_zone}

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide; ``logits`` are the way to go, in pixels. See `Policy.act`."""
        way = self.way(tokens)
        action = torch.zeros_like(way, dtype=torch.int64)
        action = action.masked_fill(way < -self.dead_zone, self.up)
        action = action.masked_fill(way > self.dead_zone, self.down)
        none = torch.zeros_like(way)
        return Decision(action, none, none, way[..., None], state)

    def way(self, tokens: Tokens) -> Tensor:
        """Pixels ``(*B,)`` from the paddle down to where it should be."""
        before, now = self.frames(tokens)
        ball, paddle = _find(now, BALL_COLUMNS), _find(now, PADDLE_COLUMNS)
        old_ball = _find(before, BALL_COLUMNS)
        old_paddle = _find(before, PADDLE_COLUMNS)
        seen_twice = paddle.present & old_paddle.present
        motion = torch.where(seen_twice, paddle.row - old_paddle.row, 0.0)
        way = self._target(ball, old_ball) - paddle.row - motion
        return torch.where(paddle.present, way, 0.0)

    def frames(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The last two frames ``(*B, 84, 84)``; the same one twice if there is one."""
        pixels = SCREEN // self.side
        features = tokens.features.masked_fill(tokens.padding[..., None], BACKGROUND)
        shape = (self.side, self.side, -1, pixels, pixels)
        patches = features.unflatten(-1, shape[2:]).unflatten(-4, shape[:2])
        first = max(patches.shape[-3] - 2, 0)
        both = patches[..., [first, -1], :, :].movedim(-3, -5)
        stacked = both.transpose(-3, -2).flatten(-4, -3).flatten(-2)
        before, now = stacked.unbind(-3)
        return before, now

    def _target(self, ball: Seen, old: Seen) -> Tensor:
        across, along = ball.column - old.column, ball.row - old.row
        steps = (HIT - ball.column) / across.clamp(min=SLOWEST)
        crossing = _reflect(ball.row + along * steps.clamp(0, FARTHEST))
        approaching = ball.present & old.present & (across > SLOWEST)
        return torch.where(approaching, crossing + self.offset, MIDDLE)


def _find(frames: Tensor, columns: slice) -> Seen:
    """The centre of what is light in some columns of the field, weighed by light."""
    part = frames[..., FIELD, columns].float() - BACKGROUND
    light = torch.where(part > MARGIN, part, 0.0)
    by_row, by_column = light.sum(-1), light.sum(-2)
    total = by_row.sum(-1)
    rows = torch.arange(FIELD.start, FIELD.stop, device=light.device).float()
    places = torch.arange(columns.start, columns.stop, device=light.device).float()
    share = total.clamp(min=1.0)
    return Seen(by_column @ places / share, by_row @ rows / share, total > 0)


def _reflect(rows: Tensor) -> Tensor:
    """Fold rows beyond the walls back into the field."""
    low, high = WALLS
    folded = (rows - low).remainder(2 * (high - low))
    return low + torch.minimum(folded, 2 * (high - low) - folded)
