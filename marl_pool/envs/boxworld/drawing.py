"""Drawing a room of colored cells with OpenCV, as in the AdaPool paper's Figure 10."""

from collections.abc import Sequence

import numpy as np

from marl_pool.envs.drawing.canvas import ATTENTION, FOCUS, Color, blend, opencv

WALL: Color = (25, 25, 25)
LINE: Color = (200, 200, 200)
TEXT: Color = (200, 200, 200)
GAP = 0.03  # of a cell's side, to its edge: equal neighbors stay two
MAX_RIM = 0.2  # of a cell's side, where attention is strongest


def draw_grid(
    colors: np.ndarray, n: int, attention: np.ndarray | None, *, text: str, size: int
) -> np.ndarray:
    """Draw the room within its wall, and the held key in the wall's corner.

    A cell's attention counts in multiples of the fair share, 1 over the number of
    tokens attended to, and shows as an orange rim: uniform attention looks faint,
    however many there are.

    Args:
        colors: ``(n² + 1, 3)`` uint8 RGB, of the held key (black for none), then of
            the cells row by row.
        n: cells along a side.
        attention: ``(n² + 1,)`` weights, at least 0; None for none.
        text: for the lower wall.
        size: height and width in pixels.

    Returns:
        ``(size, size, 3)`` uint8 RGB.
    """
    side = size / (n + 2)
    image = np.full((size, size, 3), WALL, np.uint8)
    _square(image, (1, 1), side, (0, n), LINE)
    shares = np.zeros(len(colors)) if attention is None else _shares(attention)
    for place, color in enumerate(colors.tolist()):
        if place == 0 and color == [0, 0, 0]:
            continue  # no key is held
        row, column = divmod(place - 1, n) if place else (-1, -1)
        share = float(shares[place])
        if share > 0:
            rim = blend(ATTENTION, 0.15 + 0.85 * share, LINE)
            _square(image, (row + 1, column + 1), side, (GAP, 1 - GAP), rim)
        inset = GAP + MAX_RIM * share
        _square(image, (row + 1, column + 1), side, (inset, 1 - inset), color)
    _write(image, text, side)
    return image


def _shares(attention: np.ndarray) -> np.ndarray:
    """From weights to shares of the strongest look, in [0, 1)."""
    fair = 1 / max(int(np.count_nonzero(attention)), 1)
    return np.asarray(1 - np.exp(-attention / (FOCUS * fair)))


def _square(
    image: np.ndarray,
    cell: tuple[int, int],
    side: float,
    reach: tuple[float, float],
    color: Sequence[int],
) -> None:
    """Fill a square from ``reach[0]`` to ``reach[1]`` sides beyond a cell's corner."""
    top, left = (round((at + reach[0]) * side) for at in cell)
    bottom, right = (round((at + reach[1]) * side) for at in cell)
    image[top:bottom, left:right] = color


def _write(image: np.ndarray, text: str, side: float) -> None:
    cv2 = opencv()
    at = (round(0.3 * side), round(len(image) - 0.3 * side))
    scale, font = side / 60, cv2.FONT_HERSHEY_SIMPLEX
    cv2.putText(image, text, at, font, scale, TEXT, 1, cv2.LINE_AA)
