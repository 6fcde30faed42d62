"""Rendering of a cart with its pole, and a bar for the attention to each token."""

import math
from collections.abc import Sequence

import numpy as np

from marl_pool.envs.cartpole.physics import POLE_LENGTH, TRACK
from marl_pool.envs.drawing import canvas

Point = tuple[float, float]
EXTENT = 2.8
RAIL = 1.0
"""Height of the track in the image; the bars are below."""
CART: Point = (0.2, 0.1)
"""Half the width and height of the cart."""
CART_COLOR: canvas.Color = (31, 90, 200)
POLE_COLOR: canvas.Color = (214, 39, 40)
FLOOR, HEIGHT = -2.0, 1.6
"""Position of the bars, and the height of the highest bar."""
SHORT = {"position": "x", "velocity": "x'", "angular_velocity": "th'"}


class CartPoleFrame(canvas.Frame):
    """A `Frame` with a cart and bars."""

    def cart(self, position: float, angle: float) -> None:
        """Draw the track, and the cart with its pole at ``angle`` from upright."""
        stop = CART[1]
        # Draw the track between its stops.
        for end in (-TRACK, TRACK):
            self._stroke((end, RAIL - stop), (end, RAIL + stop), canvas.INK, 3)
        self._stroke((-TRACK, RAIL), (TRACK, RAIL), canvas.INK, 2)
        # Draw the cart.
        half_width, half_height = CART
        low = (position - half_width, RAIL - half_height)
        self._box(low, (position + half_width, RAIL + half_height), CART_COLOR)
        # Draw the pole and its pivot.
        tip = (
            position - POLE_LENGTH * math.sin(angle),
            RAIL + POLE_LENGTH * math.cos(angle),
        )
        width = max(2, round(self.projection.pixels(0.06)))
        self._stroke((position, RAIL), tip, POLE_COLOR, width)
        (pivot,) = self.projection.project(np.array([(position, RAIL)]))
        self._disc(pivot, self.projection.pixels(0.05), canvas.INK)

    def bars(self, names: Sequence[str], weights: np.ndarray) -> None:
        """Draw a bar for each attention weight.

        The horizontal line is the weight of uniform attention, 1 over the number of
        tokens. The highest bar is `FOCUS` times that weight or more.
        """
        slot = 2 * TRACK / len(names)
        heights = HEIGHT * np.clip(weights * len(names) / canvas.FOCUS, 0, 1)
        for place, (name, height) in enumerate(zip(names, heights, strict=True)):
            middle = -TRACK + (place + 0.5) * slot
            low, high = middle - 0.3 * slot, middle + 0.3 * slot
            self._box((low, FLOOR), (high, FLOOR + HEIGHT), canvas.GRID)
            self._box((low, FLOOR), (high, FLOOR + height), canvas.ATTENTION)
            self._name(SHORT.get(name, name.replace("noise_", "n")), middle, slot)
        uniform = FLOOR + HEIGHT / canvas.FOCUS
        self._stroke(
            (-TRACK, uniform), (TRACK, uniform), canvas.blend(canvas.INK, 0.5), 1
        )

    def _name(self, name: str, middle: float, slot: float) -> None:
        # A letter is about half as wide as its line is high.
        room = self.projection.pixels(slot) / max(0.55 * len(name), 1)
        line = round(min(self.projection.size / 28, room))
        ((x, y),) = self.projection.project(np.array([(middle, FLOOR)]))
        start = round(x - 0.25 * line * len(name))
        canvas.write(self.image, name, (start, round(y + line)), line)

    def _stroke(
        self, first: Point, last: Point, color: canvas.Color, width: int
    ) -> None:
        self._line(self.projection.project(np.array([first, last])), color, width)

    def _box(self, low: Point, high: Point, color: canvas.Color) -> None:
        corners = self.projection.project(np.array([low, high]))
        first, last = (canvas.fixed(corner) for corner in corners)
        cv2 = canvas.opencv()
        cv2.rectangle(self.image, first, last, color, -1, cv2.LINE_AA, canvas.SHIFT)


def draw(
    position: float,
    angle: float,
    *,
    names: Sequence[str],
    weights: np.ndarray | None,
    size: int,
) -> np.ndarray:
    """Render the image ``(size, size, 3)`` of a cart and its pole.

    Args:
        position: position of the cart in meters.
        angle: angle of the pole in radians from upright, growing to the left.
        names: channel of each token.
        weights: ``(N,)`` attention weights; None draws no bars.
        size: height and width in pixels.
    """
    frame = CartPoleFrame(canvas.Projection(EXTENT, size))
    frame.cart(position, angle)
    if weights is not None:
        frame.bars(names, weights)
    return frame.image
