"""Features of a Pong game: where the ball will arrive, and the privileged targets."""

import math

import numpy as np

from marl_pool.envs.pong.console import GameState

PADDLE_COLUMN = 188
"""The value of ``ball_x`` at which the ball meets our paddle."""
OPPONENT_COLUMN = 65
"""The value of ``ball_x`` at which the ball meets the opponent's paddle."""
WALLS = (45.0, 206.5)
"""Values of ``ball_y`` at which the walls reflect the ball."""
SPEED_SCALE = 4.0
"""Pixels a frame by which the ball's velocity is divided."""
TARGET_NAMES = (
    "crossing",
    "rest",
    "paddle",
    "ball_x",
    "ball_y",
    "velocity_x",
    "velocity_y",
)
"""Names of the privileged targets, in the order of `privileged_targets`."""


def approaches(state: GameState) -> bool:
    """Tell if the ball moves towards our paddle and has not passed it."""
    return state.ball_y > 0 and state.velocity_x > 0 and state.ball_x <= PADDLE_COLUMN


def crossing(state: GameState) -> float:
    r"""Predict the row at which an approaching ball meets the paddle.

    A ball at column x and row y with velocity (u, v) crosses the paddle's column h at

    .. math:: y + (h - x)\, v / u

    reflected at the walls.
    """
    low, high = WALLS
    frames = (PADDLE_COLUMN - state.ball_x) / state.velocity_x
    unfolded = state.ball_y + state.velocity_y * frames - low
    folded = unfolded % (2 * (high - low))
    return low + min(folded, 2 * (high - low) - folded)


def privileged_targets(state: GameState) -> np.ndarray:
    """Compute the auxiliary head's targets, ``(7,)`` float32 named in `TARGET_NAMES`.

    Positions are scaled to [-1, 1] over the range of the ball. Unknown targets are NaN:
    the ball's position and velocity while there is no ball, and its crossing unless it
    approaches.
    """
    # Scale the ball's position and velocity to about [-1, 1].
    width = PADDLE_COLUMN - OPPONENT_COLUMN
    ball = (
        2 * (state.ball_x - OPPONENT_COLUMN) / width - 1,
        _scaled(state.ball_y),
        state.velocity_x / SPEED_SCALE,
        state.velocity_y / SPEED_SCALE,
    )
    # Targets that are undefined are NaN.
    targets = (
        _scaled(crossing(state)) if approaches(state) else math.nan,
        _scaled(state.rest),
        _scaled(state.paddle_y),
        *(ball if state.ball_y > 0 else [math.nan] * len(ball)),
    )
    return np.array(targets, np.float32)


def _scaled(row: float) -> float:
    """Map rows between the walls to [-1, 1]."""
    low, high = WALLS
    return 2 * (row - low) / (high - low) - 1
