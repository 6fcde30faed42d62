"""What a player of Pong knows of the game, in numbers that are easy to learn."""

import math

import numpy as np

from marl_pool.envs.pong_player import HIT, WALLS, Moment, approaches, crossing

HINTS = ("crossing", "rest", "paddle", "ball_x", "ball_y", "across", "along")
"""What `hints` says: the row where the ball will cross, that where our paddle comes to
rest and that where it is, the ball's place, and its motion to the right and down."""
LEFTMOST = 65
"""The column, in the console's units, where the ball meets the opponent's paddle."""
FASTEST = 4.0
"""Pixels a frame by which the ball's motion is divided."""


def hints(moment: Moment) -> np.ndarray:
    """What can be said of a moment, ``(7,)`` float32 in the order of `HINTS`.

    Rows and columns are between -1 and 1 where the ball can be. NaN is what is not
    known: all of the ball where there is none, and where it will cross unless it
    approaches.
    """
    field, nothing = moment.field, math.nan
    there = field.ball_y > 0
    known = (
        _row(crossing(field)) if approaches(field) else nothing,
        _row(moment.rest),
        _row(field.paddle_y),
        2 * (field.ball_x - LEFTMOST) / (HIT - LEFTMOST) - 1 if there else nothing,
        _row(field.ball_y) if there else nothing,
        field.across / FASTEST if there else nothing,
        field.along / FASTEST if there else nothing,
    )
    return np.array(known, np.float32)


def _row(row: float) -> float:
    """From the console's rows between the walls to [-1, 1]."""
    low, high = WALLS
    return 2 * (row - low) / (high - low) - 1
