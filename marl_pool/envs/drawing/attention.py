"""Attention weights drawn into the frames of any environment."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from marl_pool.envs.drawing.canvas import (
    ATTENTION,
    BLUE,
    GREEN,
    MAX_WIDTH,
    PURPLE,
    VERMILION,
    draw_lines,
    draw_rings,
)
from marl_pool.envs.drawing.frames import to_rgb
from marl_pool.utils.errors import InputError

HEAD_COLORS = (ATTENTION, BLUE, GREEN, PURPLE, VERMILION)
"""Colors of attention heads, repeated if there are more heads."""


def draw_attention(
    frame: ArrayLike,
    positions: ArrayLike | Tensor,
    weights: ArrayLike | Tensor,
    *,
    observer: ArrayLike | Tensor | None = None,
    radius: float = 12.0,
) -> np.ndarray:
    """Draw attention weights into a frame of any environment, as in the videos.

    With an observer, lines lead from it to the entities, and a halo shows its own
    weight; without one, rings surround the entities. Width and opacity grow with the
    weight, measured in multiples of uniform attention, so that uniform attention looks
    faint for any number of entities. Heads have different colors, side by side.

    Needs OpenCV, in the extra ``plots``.

    Example:
        >>> frame = np.full((64, 64, 3), 255, np.uint8)
        >>> drawn = draw_attention(frame, [(16, 16), (48, 32)], [0.9, 0.1])
        >>> drawn.shape, (drawn != frame).any()
        ((64, 64, 3), True)

    Args:
        frame: picture ``(height, width, 3)`` of bytes in RGB, or floats in [0, 1].
        positions: ``(N, 2)`` x to the right and y down, in pixels from the upper left
            pixel; NaN for an entity that is absent or out of the picture.
        weights: ``(N,)`` or ``(heads, N)``, at least 0; NaN or 0 for an absent entity.
        observer: ``(2,)`` position of the observer; None for rings instead of lines.
        radius: radius of the rings, in pixels.

    Returns:
        A new picture, ``(height, width, 3)`` uint8.

    Raises:
        InputError: another shape, negative or infinite weights, a negative radius, or
            no OpenCV.
    """
    try:
        image = to_rgb(frame).copy()
    except InputError as error:
        raise InputError(f"frame: {error}") from error
    points = _numbers("positions", positions, "(N, 2)")
    if points.ndim != 2 or points.shape[1] != 2:
        raise InputError(f"positions: expected the shape (N, 2), got {points.shape}")
    count = len(points)
    shape = f"({count},) or (heads, {count})"
    heads = np.atleast_2d(_numbers("weights", weights, shape))
    if heads.ndim != 2 or heads.shape[1] != count:
        raise InputError(f"weights: expected the shape {shape}, got {heads.shape}")
    start = None if observer is None else _numbers("observer", observer, "(2,)")
    if start is not None and (start.shape != (2,) or not np.isfinite(start).all()):
        raise InputError(f"observer: expected x and y, got {start.tolist()}")
    if not isinstance(radius, int | float) or not 0 <= radius < np.inf:
        raise InputError(f"radius: expected a number of at least 0, got {radius!r}")
    # Absent entities get no line.
    present = np.isfinite(points).all(1)
    heads = np.where(np.isnan(heads), 0.0, heads)[:, present]
    if not ((heads >= 0) & np.isfinite(heads)).all():
        raise InputError("weights: expected finite numbers of at least 0")
    for number, head in enumerate(heads):
        color = HEAD_COLORS[number % len(HEAD_COLORS)]
        if start is None:
            reach = radius + number * MAX_WIDTH
            draw_rings(image, points[present], head, reach, color)
        else:
            shift = (number - (len(heads) - 1) / 2) * MAX_WIDTH
            draw_lines(image, points[present], start, head, color, shift)
    return image


def _numbers(key: str, values: Any, shape: str) -> np.ndarray:
    """Return an array of floats; ``shape`` is the expected one."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{key}: expected numbers of the shape {shape}") from error
