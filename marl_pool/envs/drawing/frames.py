"""Pictures from any environment as RGB bytes."""

from typing import Any

import numpy as np

from marl_pool.envs.drawing.canvas import PAPER, opencv
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import kind_of

ROUNDING = 1e-3
"""Largest excess over a range that counts as a rounding error."""


def to_rgb(image: Any) -> np.ndarray:
    """Convert a picture to ``(height, width, 3)`` uint8.

    Booleans, floats in [0, 1] and integers of 0 and 1 are scaled to 255; other numbers
    must be in [0, 255].

    Raises:
        InputError: no numbers, another shape, an empty picture, a number that is NaN,
            negative or above 255, or floats whose maximum is between 1 and 2, which
            fits neither range.
    """
    try:
        picture = np.asarray(image)
    except (TypeError, ValueError):  # nested lists of unequal lengths, other objects
        picture = np.empty((), object)
    if picture.dtype.kind not in "biuf":
        raise InputError(f"expected an array of numbers, got {kind_of(image)}")
    if picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise InputError(
            f"expected a picture of shape (height, width, 3), got {picture.shape}"
        )
    high, is_float = picture.max(), picture.dtype.kind == "f"
    # Unscaled, integers of 0 and 1 would look black.
    is_share = high <= 1 + ROUNDING if is_float else high == 1
    if picture.dtype == np.uint8 and not is_share:
        return picture
    low, is_ambiguous = picture.min(), is_float and not is_share and high < 2
    # NaN is in no range.
    if is_ambiguous or not (low >= -ROUNDING and high <= 255 + ROUNDING):
        raise InputError(
            "expected a picture of numbers from 0 to 255, floats from 0 to 1 or "
            f"booleans, got {picture.dtype} from {low:g} to {high:g}"
        )
    scaled = picture * np.float64(255) if is_share else picture
    return np.round(scaled).clip(0, 255).astype(np.uint8)


def fit_square(image: np.ndarray, size: int) -> np.ndarray:
    """Scale an image into ``(size, size, 3)``, keeping its proportions."""
    if image.shape[:2] == (size, size):
        return image.copy()  # the environment may still write into the image
    cv2 = opencv()
    scale = size / max(image.shape[:2])
    height, width = (max(1, round(scale * length)) for length in image.shape[:2])
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    small = cv2.resize(np.ascontiguousarray(image), (width, height), None, 0, 0, method)
    canvas = np.full((size, size, 3), PAPER, np.uint8)
    y, x = (size - height) // 2, (size - width) // 2
    canvas[y : y + height, x : x + width] = small
    return canvas
