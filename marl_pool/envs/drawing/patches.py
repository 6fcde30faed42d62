"""Rendering of a screen with the attention to its patches."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from marl_pool.envs.drawing.canvas import ATTENTION, FOCUS, Color, opencv
from marl_pool.utils.errors import InputError

OPACITY = 0.8
"""Opacity of the tint of a patch with all the attention."""


OUTLINE: Color = (255, 60, 60)


class PatchGrid(NamedTuple):
    """A square screen cut into patches, in rows from the upper left."""

    screen: int
    """Height and width in pixels."""
    patch: int
    """Height and width of a patch in pixels."""
    stride: int
    """Pixels from a patch to the next one."""

    def corner(self, token: int) -> tuple[int, int]:
        """Return the left and upper pixel of a patch."""
        side = (self.screen - self.patch) // self.stride + 1
        return token % side * self.stride, token // side * self.stride


def outline(image: np.ndarray, grid: PatchGrid, tokens: Iterable[int]) -> np.ndarray:
    """Draw a frame around some patches.

    Args:
        image: ``(size, size, 3)`` uint8 RGB of the whole screen.
        grid: patches of the screen.
        tokens: indices of the patches.

    Returns:
        A new image.
    """
    cv2, framed = opencv(), image.copy()
    scale = len(image) / grid.screen
    width = max(1, round(scale / 3))
    for token in tokens:
        left, top = grid.corner(token)
        first = (round(left * scale), round(top * scale))
        last = (
            round((left + grid.patch) * scale) - 1,
            round((top + grid.patch) * scale) - 1,
        )
        cv2.rectangle(framed, first, last, OUTLINE, width)
    return framed


def draw(
    screen: np.ndarray,
    attention: Tensor | None,
    *,
    patch: int,
    stride: int,
    size: int,
) -> np.ndarray:
    """Enlarge a screen and tint its patches by their attention weights.

    A weight is measured in multiples of uniform attention, so that uniform attention
    looks faint. Where patches overlap, the largest weight counts.

    Args:
        screen: ``(height, height)`` uint8 grey, or ``(height, height, 3)`` RGB.
        attention: ``(N,)`` weights in [0, 1] of the patches, row by row; None for no
            tint.
        patch: height and width of a patch in pixels.
        stride: pixels from a patch to the next one.
        size: height and width of the image in pixels.

    Returns:
        ``(size, size, 3)`` uint8 RGB.

    Raises:
        InputError: a wrong number of weights, or OpenCV is not installed.
    """
    cv2 = opencv()
    image = screen if screen.ndim == 3 else np.repeat(screen[..., None], 3, axis=2)
    if attention is not None:
        opacity = _opacities(attention, len(screen), patch, stride)
        image = np.rint(opacity * ATTENTION + (1 - opacity) * image).astype(np.uint8)
    larger: np.ndarray = cv2.resize(
        image, (size, size), interpolation=cv2.INTER_NEAREST
    )
    return larger


def _opacities(attention: Tensor, height: int, patch: int, stride: int) -> np.ndarray:
    """Compute the opacity of the tint at each pixel, ``(height, height, 1)``."""
    side = (height - patch) // stride + 1
    if attention.shape != (side * side,):
        raise InputError(
            f"attention: expected one weight for each of {side * side} tokens, "
            f"got the shape {tuple(attention.shape)}"
        )
    weights = attention.double().cpu().numpy().reshape(side, side)
    opacities = OPACITY * (1 - np.exp(-weights * side * side / FOCUS))
    image = np.zeros((height, height, 1))
    for (row, column), opacity in np.ndenumerate(opacities):
        top, left = row * stride, column * stride
        covered = image[top : top + patch, left : left + patch]
        np.maximum(covered, opacity, out=covered)
    return image
