"""Headless rendering of discs in the plane with OpenCV."""

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from marl_pool.files import figures
from marl_pool.utils.errors import InputError

Color = tuple[int, int, int]

PAPER: Color = (252, 252, 250)
INK: Color = (60, 60, 60)
GRID: Color = (232, 232, 230)
BLUE, GREEN, PURPLE, VERMILION, ATTENTION = (
    (int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16))
    for color in (
        figures.BLUE,
        figures.GREEN,
        figures.PURPLE,
        figures.VERMILION,
        figures.ORANGE,
    )
)
"""Colors safe for color-blind viewers, in videos and on the live page."""
OBSTACLE: Color = (70, 70, 70)

SHIFT = 4  # fractional bits of OpenCV's coordinates
MIN_RADIUS = 4.0  # pixels, so that small discs stay visible
FOCUS = 4  # multiple of uniform attention that gives a line 1 - 1/e of its width
MIN_WEIGHT = 0.02  # fraction of the full width below which no line is drawn
MAX_WIDTH = 7  # pixels


def opencv() -> ModuleType:
    """Import OpenCV, or raise an InputError with the package to install."""
    try:
        import cv2
    except ImportError as error:
        raise InputError(
            "drawing needs OpenCV: install opencv-python-headless"
        ) from error
    return cv2


class Disc(NamedTuple):
    """Appearance of a kind of entity."""

    name: str
    color: Color
    radius: float
    """In units of the environment."""


class Projection(NamedTuple):
    """Projection of the square of coordinates in ``[-extent, extent]``, y upwards."""

    extent: float
    size: int
    """Height and width of the image in pixels."""

    def pixels(self, length: float) -> float:
        """Convert a length to pixels."""
        return length * self.size / (2 * self.extent)

    def project(self, points: np.ndarray) -> np.ndarray:
        """Convert points ``(n, 2)`` to pixel coordinates ``(n, 2)``."""
        scale = np.array([1.0, -1.0]) * self.size / (2 * self.extent)
        return np.asarray(self.size / 2 + points * scale - 0.5)


def blend(color: Color, opacity: float, ground: Color = PAPER) -> Color:
    """Blend ``color`` with ``ground``, with opacity in [0, 1]."""
    red, green, blue = (
        round(opacity * c + (1 - opacity) * g)
        for c, g in zip(color, ground, strict=True)
    )
    return red, green, blue


def attention_strengths(weights: np.ndarray) -> np.ndarray:
    """Convert attention weights ``(n,)`` to strengths in [0, 1).

    A weight is measured in multiples of uniform attention, 1 over the number of
    positive weights, so that uniform attention looks faint for any ``n``.
    """
    uniform = 1 / max(int(np.count_nonzero(weights)), 1)
    return np.asarray(1 - np.exp(-weights / (FOCUS * uniform)))


def write(
    image: np.ndarray, text: str, at: tuple[int, int], line: float, color: Color = INK
) -> int:
    """Write text from the pixel ``at``, for lines ``line`` pixels high.

    Returns:
        Width of the text in pixels.
    """
    cv2 = opencv()
    font = cv2.FONT_HERSHEY_SIMPLEX
    cv2.putText(image, text, at, font, line / 36, color, 1, cv2.LINE_AA)
    return width_of(text, line)


def width_of(text: str, line: float) -> int:
    """Return the width in pixels of text that `write` writes."""
    cv2 = opencv()
    return int(cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, line / 36, 1)[0][0])


def draw_line(
    image: np.ndarray, ends: np.ndarray, color: Color | int, width: int
) -> None:
    """Draw a line between two points ``(2, 2)`` in pixels."""
    first, last = (fixed(end) for end in ends)
    cv2 = opencv()
    cv2.line(image, first, last, color, width, cv2.LINE_AA, SHIFT)


def draw_disc(
    image: np.ndarray,
    center: np.ndarray,
    radius: float,
    color: Color | int,
    width: int = -1,
) -> None:
    """Draw a disc, or a ring if ``width`` is positive; lengths are in pixels."""
    at, pixels = fixed(center), round(radius * (1 << SHIFT))
    cv2 = opencv()
    cv2.circle(image, at, pixels, color, width, cv2.LINE_AA, SHIFT)


def fixed(point: np.ndarray) -> tuple[int, int]:
    """Convert a point to fixed-point pixel coordinates, clipped to 32-bit integers."""
    x, y = np.clip(point, -1e4, 1e4) * (1 << SHIFT)
    return round(x), round(y)


def draw_lines(
    image: np.ndarray,
    points: np.ndarray,
    observer: np.ndarray,
    weights: np.ndarray,
    color: Color = ATTENTION,
    shift: float = 0.0,
) -> None:
    """Draw attention weights as lines; see `Frame.attention`.

    Args:
        image: the image to draw on.
        points: ``(n, 2)`` pixel coordinates.
        observer: ``(2,)`` coordinates of the observer; a point there becomes a halo.
        weights: ``(n,)`` attention weights, at least 0.
        color: color of full attention.
        shift: sideways displacement of the lines in pixels.
    """
    opacity = np.zeros(image.shape[:2], np.uint8)
    for entity, strength, level in _visible(weights):
        if np.allclose(points[entity], observer):
            radius = MIN_RADIUS + 10 * strength + 2 * abs(shift)
            width = -1 if not shift else max(1, round(MAX_WIDTH / 2 * strength))
            draw_disc(opacity, observer, radius, level, width)
        else:
            line = np.stack((observer, points[entity]))
            x, y = line[1] - line[0]
            line += shift * np.array((-y, x)) / np.hypot(x, y)
            draw_line(opacity, line, level, max(1, round(MAX_WIDTH * strength)))
    _mix(image, color, opacity)


def draw_rings(
    image: np.ndarray,
    points: np.ndarray,
    weights: np.ndarray,
    radius: float,
    color: Color = ATTENTION,
) -> None:
    """Draw attention weights as rings around entities; arguments as in `draw_lines`."""
    opacity = np.zeros(image.shape[:2], np.uint8)
    for entity, strength, level in _visible(weights):
        width = max(1, round(MAX_WIDTH * strength))
        draw_disc(opacity, points[entity], radius, level, width)
    _mix(image, color, opacity)


def _visible(weights: np.ndarray) -> Iterator[tuple[int, float, int]]:
    """Yield each entity that gets a line, with its strength and opacity in [0, 255]."""
    strengths = attention_strengths(weights)
    # The strongest comes last, because a line covers earlier ones.
    for entity in np.argsort(strengths):
        strength = float(strengths[entity])
        if strength >= MIN_WEIGHT:
            yield int(entity), strength, round(255 * (0.15 + 0.85 * strength))


def _mix(image: np.ndarray, color: Color, opacity: np.ndarray) -> None:
    """Mix a color into an image by opacities ``(height, width)`` from 0 to 255."""
    drawn = opacity > 0
    share, ground = opacity[drawn, None] / 255, image[drawn]
    image[drawn] = np.rint(share * color + (1 - share) * ground)


class Frame:
    """An image to draw on: lines first, then discs, then the legend."""

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self.image = np.full((projection.size, projection.size, 3), PAPER, np.uint8)
        """``(size, size, 3)`` uint8 RGB."""
        reach = int(projection.extent)
        for place in range(-reach, reach + 1):
            for ends in ([[place, -99], [place, 99]], [[-99, place], [99, place]]):
                line = projection.project(np.array(ends))
                draw_line(self.image, line, GRID, 1)

    def attention(self, points: np.ndarray, observer: int, weights: np.ndarray) -> None:
        """Draw attention weights as lines from the observer to the entities.

        A larger weight has a wider and stronger line; see `attention_strengths`. The
        weight of the observer's own token is a halo.

        Args:
            points: ``(entities, 2)`` positions.
            observer: index of the observing entity.
            weights: ``(entities,)`` attention weights, at least 0.
        """
        ends = self.projection.project(points)
        draw_lines(self.image, ends, ends[observer], weights)

    def crosses(self, points: np.ndarray) -> None:
        """Mark the points ``(n, 2)`` with crosses."""
        for center in self.projection.project(points):
            self._cross(center, 2 * MIN_RADIUS)

    def discs(
        self, looks: Sequence[Disc], points: np.ndarray, tails: np.ndarray
    ) -> None:
        """Draw discs at the ``points``, with faint tails; earlier discs are on top."""
        centers, ends = self.projection.project(points), self.projection.project(tails)
        for entity in reversed(range(len(looks))):
            look = looks[entity]
            radius = max(MIN_RADIUS, self.projection.pixels(look.radius))
            line = np.stack((centers[entity], ends[entity]))
            draw_line(self.image, line, blend(look.color, 0.35), 2)
            draw_disc(self.image, centers[entity], radius + 1, PAPER)
            draw_disc(self.image, centers[entity], radius, look.color)

    def rings(self, looks: Sequence[Disc], points: np.ndarray) -> None:
        """Draw a ring around each disc, at the ``points`` ``(n, 2)``."""
        centers = self.projection.project(points)
        for look, center in zip(looks, centers, strict=True):
            radius = max(MIN_RADIUS, self.projection.pixels(look.radius))
            draw_disc(self.image, center, radius + MIN_RADIUS, INK, 1)

    def legend(
        self, looks: Iterable[Disc], cross: str | None = None, ring: str | None = None
    ) -> None:
        """Name the kinds of discs, crosses and rings in the lower left corner."""
        line = max(12, self.projection.size // 28)
        marks: dict[str, Color | None] = {look.name: look.color for look in looks}
        marks |= {name: None for name in (cross, ring) if name is not None}
        for row, (name, color) in enumerate(marks.items()):
            center = np.array([0.8, row - len(marks) + 0.25]) * line
            center[1] += self.projection.size
            if color is not None:
                draw_disc(self.image, center, line / 4, color)
            elif name == cross:
                self._cross(center, line / 4)
            else:
                draw_disc(self.image, center, line / 4, INK, 1)
            at = (round(1.4 * line), round(center[1] + line / 4))
            write(self.image, name, at, line)

    def _cross(self, center: np.ndarray, reach: float) -> None:
        for arm in reach * np.eye(2):
            draw_line(self.image, np.stack((center - arm, center + arm)), INK, 1)
