"""Rendering of a BoxWorld with OpenCV, as in Figure 10 of the AdaPool paper."""

from collections.abc import Sequence

import numpy as np

from marl_pool.envs.drawing.canvas import (
    ATTENTION,
    Color,
    attention_strengths,
    blend,
)

WALL: Color = (25, 25, 25)
LINE: Color = (200, 200, 200)
GAP = 0.03  # fraction of a cell's side left free, so that equal neighbors are distinct
MAX_RIM = 0.2  # fraction of a cell's side at the strongest attention


def draw_grid(
    colors: np.ndarray, n: int, attention: np.ndarray | None, *, size: int
) -> np.ndarray:
    """Draw the room within its wall, and the held key in the corner of the wall.

    Attention is an orange rim around a cell; see `attention_strengths`.

    Args:
        colors: ``(n² + 1, 3)`` uint8 RGB of the held key (black for none), then of
            the cells row by row.
        n: cells along a side.
        attention: ``(n² + 1,)`` attention weights, at least 0; None draws no rims.
        size: height and width in pixels.
    """
    # The grid has a wall of one cell on each side.
    side = size / (n + 2)
    image = np.full((size, size, 3), WALL, np.uint8)
    _square(image, (1, 1), side, (0, n), LINE)
    if attention is None:
        attention = np.zeros(len(colors))
    # Draw the cells; cell 0 is the held key.
    strengths = attention_strengths(attention)
    for place, color in enumerate(colors.tolist()):
        if place == 0 and color == [0, 0, 0]:
            continue  # no key is held
        row, column = divmod(place - 1, n) if place else (-1, -1)
        strength = float(strengths[place])
        if strength > 0:
            # Attention is a rim, which is brighter and wider for a larger weight.
            rim = blend(ATTENTION, 0.15 + 0.85 * strength, LINE)
            _square(image, (row + 1, column + 1), side, (GAP, 1 - GAP), rim)
        inset = GAP + MAX_RIM * strength
        _square(image, (row + 1, column + 1), side, (inset, 1 - inset), color)
    return image


def _square(
    image: np.ndarray,
    cell: tuple[int, int],
    side: float,
    reach: tuple[float, float],
    color: Sequence[int],
) -> None:
    """Fill a square from ``reach[0]`` to ``reach[1]`` sides from a cell's corner."""
    top, left = (round((at + reach[0]) * side) for at in cell)
    bottom, right = (round((at + reach[1]) * side) for at in cell)
    image[top:bottom, left:right] = color
