"""Drawing an ant from its side, and a bar for the attention to each channel."""

from typing import Any

import numpy as np
from torch import Tensor

from marl_pool.envs.drawing.canvas import (
    ATTENTION,
    FOCUS,
    GRID,
    INK,
    PAPER,
    Color,
    opencv,
)
from marl_pool.utils.errors import InputError

NUM_PARTS = 13
"""The torso, and three parts of each of four legs."""
VIEW = 3.6
"""Meters that the picture is wide."""
YAW, PITCH = np.deg2rad(-25), np.deg2rad(28)
"""Of the camera, which looks along +y for 0 and 0; the ant is to run along +x."""
HORIZON = 0.72
"""Share of the picture's height at which the ground below the torso is."""
TORSO, LIMB = 0.25, 0.08
"""Radii in meters."""
TILES: tuple[Color, Color] = (GRID, (214, 220, 212))
SHADOW: Color = (176, 184, 174)
BODY: Color = (196, 92, 40)
LEGS: tuple[Color, ...] = (
    (31, 90, 200),
    (74, 132, 224),
    (150, 60, 140),
    (190, 104, 178),
)
STRIP = 0.16
"""Share of the picture's height that the bars take."""


def skeleton(parts: np.ndarray) -> np.ndarray:
    """The joints of the legs, from the torso's middle to the feet.

    A part is in the middle of its two ends, and so one end tells the other.

    Args:
        parts: ``(13, 3)`` middles of the torso and of each leg's parts, outwards.

    Returns:
        ``(4, 4, 3)``: of each leg the torso, the hip, the ankle and the tip.
    """
    joints = [np.repeat(parts[:1], 4, 0)]
    for middle in parts[1:].reshape(4, 3, 3).transpose(1, 0, 2):
        joints.append(2 * middle - joints[-1])
    return np.stack(joints, 1)


class _Picture:
    """An image in the making, seen by a camera that goes along with the ant."""

    def __init__(self, center: np.ndarray, size: int) -> None:
        self.cv2 = opencv()
        self.image = np.full((size, size, 3), PAPER, np.uint8)
        self._center = np.array([center[0], center[1], 0.0])
        self._scale = size / VIEW
        self._middle = np.array([0.5, HORIZON]) * size
        across = (np.cos(YAW), np.sin(YAW), 0)
        away = (-np.sin(YAW) * np.cos(PITCH), np.cos(YAW) * np.cos(PITCH))
        self._away = np.array([*away, -np.sin(PITCH)])
        self._axes = np.stack([across, -np.cross(across, self._away)], 1)

    def points(self, points: np.ndarray) -> np.ndarray:
        """Points ``(…, 3)`` in pixels, ``(…, 2)`` int."""
        places = (points - self._center) @ self._axes * self._scale + self._middle
        # OpenCV's coordinates are 32-bit; a runaway ant stays out of the picture.
        return np.rint(np.clip(places, -1e4, 1e4)).astype(np.int32)

    def distance(self, point: np.ndarray) -> float:
        """How far away a point is."""
        return float((point - self._center) @ self._away)

    def ground(self) -> None:
        """Tiles of half a meter."""
        side, reach = 0.5, 12
        first = np.floor(self._center / side).astype(int) - (reach, reach, 0)
        corners = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)])
        for place in np.ndindex(2 * reach, 2 * reach, 1):
            origin = first + np.array(place)
            tile = self.points(side * (origin + corners))
            color = TILES[origin.sum() % 2]
            self.cv2.fillConvexPoly(self.image, tile, color, self.cv2.LINE_AA)

    def limb(self, ends: np.ndarray, radius: float, color: Color) -> None:
        """A rod with round ends; a ball if they are the same."""
        first, last = self.points(ends).tolist()
        width = max(1, round(2 * radius * self._scale))
        self.cv2.line(self.image, first, last, color, width, self.cv2.LINE_AA)

    def bars(self, weights: np.ndarray) -> None:
        """A bar for each token, in multiples of the fair share; see `draw`."""
        size = len(self.image)
        top, bottom = round((1 - STRIP) * size), size - 4
        self.image[top - 4 :] = PAPER
        slot = (size - 8) / len(weights)
        heights = (bottom - top) * np.clip(weights * len(weights) / FOCUS, 0, 1)
        for place, height in enumerate(heights):
            left, right = 4 + np.array([place + 0.1, place + 0.9]) * slot
            right = max(right, left + 1)
            columns = slice(round(left), round(right))
            self.image[top:bottom, columns] = GRID
            self.image[bottom - round(height) : bottom, columns] = ATTENTION
        fair = bottom - round((bottom - top) / FOCUS)
        self.image[fair, 4:-4] = INK

    def text(self, text: str) -> None:
        """A line in the upper left."""
        line = max(12, len(self.image) // 28)
        at, font = (line // 2, line), self.cv2.FONT_HERSHEY_SIMPLEX
        style: Any = (font, line / 36, INK, 1, self.cv2.LINE_AA)
        self.cv2.putText(self.image, text, at, *style)


def draw(
    parts: np.ndarray,
    *,
    text: str,
    num_tokens: int,
    attention: Tensor | None,
    size: int,
) -> np.ndarray:
    """Draw an ant on its ground.

    Args:
        parts: ``(13, 3)`` middles of the torso and of each leg's parts, in meters.
        text: written in the upper left.
        num_tokens: how many bars there are.
        attention: ``(num_tokens,)`` weights; None draws no bars. The line across is
            the fair share; the highest bar shows `FOCUS` times as much, and more.
        size: height and width in pixels.

    Returns:
        ``(size, size, 3)`` uint8 RGB.

    Raises:
        InputError: not one weight for each token, or no OpenCV.
    """
    picture = _Picture(parts[0], size)
    picture.ground()
    rods = [(parts[[0, 0]], TORSO, BODY)]
    for leg, color in zip(skeleton(parts), LEGS, strict=True):
        rods += [(leg[i : i + 2], LIMB, color) for i in range(3)]
    for ends, radius, _ in rods:
        picture.limb(ends * (1, 1, 0), radius, SHADOW)
    # What is near hides what is far.
    for rod in sorted(rods, key=lambda rod: -picture.distance(rod[0].mean(0))):
        picture.limb(*rod)
    if attention is not None:
        if attention.shape != (num_tokens,):
            raise InputError(
                f"attention: expected one weight for each of {num_tokens} tokens, "
                f"got the shape {tuple(attention.shape)}"
            )
        picture.bars(attention.double().cpu().numpy())
    picture.text(text)
    return picture.image
