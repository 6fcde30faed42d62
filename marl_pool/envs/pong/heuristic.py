"""A scripted Pong policy that finds ball and paddle in the pixels."""

import math
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.pong.emulator import SCREEN
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import Tokens

BACKGROUND = 87
"""Grey level of the field; ball and paddles are lighter."""
MARGIN = 8
"""Grey levels above the background beyond which a pixel is bright."""
FIELD = slice(14, 77)
"""Rows of the field, in pixels of a frame."""
BALL_COLUMNS = slice(12, 72)
PADDLE_COLUMNS = slice(73, 76)
HIT = 72.5
"""Column at which the ball meets the paddle."""
WALLS = (14.5, 75.5)
"""Rows at which the walls reflect the centre of the ball."""
MIDDLE = 45.0
"""Row of the waiting paddle."""
SLOWEST = 0.3
"""Pixels per step above which a ball counts as approaching."""
FARTHEST = 60.0
"""Horizon of the prediction in steps."""
UP_AND_DOWN = {3: (1, 2), 6: (2, 3)}
"""The actions up and down, by the number of actions."""


class BrightSpot(NamedTuple):
    """Centre of the bright pixels in a region; each ``(*B,)``."""

    column: Tensor
    row: Tensor
    present: Tensor
    """bool; without bright pixels the centre is undefined."""


class PongHeuristic(Heuristic):
    r"""Move the paddle to the predicted crossing of the ball, from the last two frames.

    A ball at column x and row y that moves by (u, v) pixels per step crosses the
    paddle's column h at the row

    .. math:: y + (h - x)\, v / u

    reflected at the walls. The paddle is pressed towards the crossing if its centre,
    plus its last motion on account of its inertia, is more than ``dead_zone`` away.
    While the ball moves away or is not visible, the paddle goes to the middle.

    The policy ignores the angle at which the ball leaves the paddle, so it is a weak
    opponent. Without sticky actions the result depends on the start: some of the 31
    are lost 0 : 21 in some 760 steps; from most others it is a few points ahead in long
    rallies, and no observed game was won within 1500 steps. With sticky actions it
    loses. `ValueTableTeacher`, which reads the console's memory, is stronger.

    The patches are assembled by their order, so a shuffle makes the frames
    meaningless. Missing patches are background. `Decision.logits` are the distances of
    the paddle to its target.

    Args:
        group: the agents' group, for its patches and actions.
        offset: aim in pixels below the crossing, so that the ball leaves at an angle.
        dead_zone: distance in pixels within which the paddle rests.
    """

    def __init__(
        self, group: AgentGroup, offset: float = -2.0, dead_zone: float = 1.5
    ) -> None:
        super().__init__(offset=offset, dead_zone=dead_zone)
        assert isinstance(group.action_space, spaces.Discrete)
        self.up, self.down = UP_AND_DOWN[int(group.action_space.n)]
        self.side = math.isqrt(group.tokens.num_tokens)
        self.offset, self.dead_zone = offset, dead_zone

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        distance = self.distance(tokens)
        action = torch.zeros_like(distance, dtype=torch.int64)
        action = action.masked_fill(distance < -self.dead_zone, self.up)
        action = action.masked_fill(distance > self.dead_zone, self.down)
        return action, distance[..., None]

    def distance(self, tokens: Tokens) -> Tensor:
        """Compute the signed distance ``(*B,)`` of the paddle to its target."""
        # Positions and motions of ball and paddle in the last two frames.
        frames = self.frames(tokens)
        old_ball, ball = (_find(frame, BALL_COLUMNS) for frame in frames)
        old_paddle, paddle = (_find(frame, PADDLE_COLUMNS) for frame in frames)
        seen_twice = paddle.present & old_paddle.present
        motion = torch.where(seen_twice, paddle.row - old_paddle.row, 0.0)
        distance = self._target(ball, old_ball) - paddle.row - motion
        return torch.where(paddle.present, distance, 0.0)

    def frames(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Assemble the last two frames ``(*B, 84, 84)``; a single frame is repeated."""
        pixels = SCREEN // self.side
        # Patches to frames: undo the cut of `patch_tokens` in its order.
        features = tokens.features.masked_fill(tokens.padding[..., None], BACKGROUND)
        shape = (self.side, self.side, -1, pixels, pixels)
        patches = features.unflatten(-1, shape[2:]).unflatten(-4, shape[:2])
        first = max(patches.shape[-3] - 2, 0)
        last_frames = patches[..., [first, -1], :, :].movedim(-3, -5)
        stacked = last_frames.transpose(-3, -2).flatten(-4, -3).flatten(-2)
        return stacked.select(-3, 0), stacked.select(-3, 1)

    def _target(self, ball: BrightSpot, old: BrightSpot) -> Tensor:
        # Extrapolate the ball to the paddle's column, reflected at the walls.
        velocity_x, velocity_y = ball.column - old.column, ball.row - old.row
        # A ball that does not approach is masked below; avoid a division by 0.
        steps = (HIT - ball.column) / velocity_x.clamp(min=SLOWEST)
        crossing = _reflect(ball.row + velocity_y * steps.clamp(0, FARTHEST))
        approaching = ball.present & old.present & (velocity_x > SLOWEST)
        return torch.where(approaching, crossing + self.offset, MIDDLE)


def _find(frames: Tensor, columns: slice) -> BrightSpot:
    """Compute the centre of the bright pixels in some columns, weighted by light."""
    part = frames[..., FIELD, columns].float() - BACKGROUND
    light = torch.where(part > MARGIN, part, 0.0)
    by_row, by_column = light.sum(-1), light.sum(-2)
    total = by_row.sum(-1)
    rows = torch.arange(FIELD.start, FIELD.stop, device=light.device).float()
    places = torch.arange(columns.start, columns.stop, device=light.device).float()
    share = total.clamp(min=1.0)
    return BrightSpot(by_column @ places / share, by_row @ rows / share, total > 0)


def _reflect(rows: Tensor) -> Tensor:
    """Fold rows beyond the walls back into the field."""
    low, high = WALLS
    folded = (rows - low).remainder(2 * (high - low))
    return low + torch.minimum(folded, 2 * (high - low) - folded)
