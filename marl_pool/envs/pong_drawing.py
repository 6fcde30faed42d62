"""Drawing a screen, and attention to its patches."""

import math

import numpy as np
from torch import Tensor

from marl_pool.envs.drawing import ATTENTION, FOCUS, opencv
from marl_pool.errors import InputError

OPACITY = 0.8
"""Of the tint of a patch that has all the attention."""


def draw(
    screen: np.ndarray, attention: Tensor | None, num_patches: int, size: int
) -> np.ndarray:
    """Enlarge a screen, its patches tinted by the attention that they get.

    A weight counts in multiples of the fair share, so that uniform attention looks
    faint.

    Args:
        screen: ``(height, width)`` uint8, as high as wide.
        attention: ``(num_patches,)`` weights in [0, 1], in rows; None for no tint.
        num_patches: how many patches the screen consists of, a square number.
        size: height and width of the image in pixels.

    Returns:
        ``(size, size, 3)`` uint8 RGB.

    Raises:
        InputError: another number of weights, or no OpenCV.
    """
    cv2 = opencv()
    image = np.repeat(screen[..., None], 3, axis=2)
    if attention is not None:
        shares = _shares(attention, num_patches, len(screen))
        image = np.rint(shares * ATTENTION + (1 - shares) * image).astype(np.uint8)
    larger: np.ndarray = cv2.resize(
        image, (size, size), interpolation=cv2.INTER_NEAREST
    )
    return larger


def _shares(attention: Tensor, num_patches: int, height: int) -> np.ndarray:
    """The opacity of the tint at each pixel, ``(height, height, 1)``."""
    if attention.shape != (num_patches,):
        raise InputError(
            f"attention: expected one weight for each of {num_patches} tokens, "
            f"got the shape {tuple(attention.shape)}"
        )
    side = math.isqrt(num_patches)
    weights = attention.double().cpu().numpy().reshape(side, side)
    shares = OPACITY * (1 - np.exp(-weights * num_patches / FOCUS))
    return np.kron(shares, np.ones((height // side, height // side)))[..., None]
