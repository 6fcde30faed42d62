"""Pixels of pictures and videos, for tests of what is drawn."""

from pathlib import Path

import cv2
import numpy as np
from matplotlib.colors import to_rgb


def read_picture(path: Path) -> np.ndarray:
    """Read a picture as ``(H, W, 3)`` RGB bytes."""
    picture = cv2.imread(str(path))
    assert picture is not None, f"{path} is no picture"
    return picture[..., ::-1]


def read_video(path: Path) -> list[np.ndarray]:
    """Read a video's frames, each ``(H, W, 3)`` RGB bytes."""
    capture, frames = cv2.VideoCapture(str(path)), []
    while True:
        has_frame, frame = capture.read()
        if not has_frame:
            return frames
        frames.append(frame[..., ::-1])


def share_of(color: str, picture: np.ndarray, tolerance: int = 8) -> float:
    """Measure the share of pixels that have a color, named as in matplotlib.

    Args:
        color: such as ``"C0"``, ``"black"`` or ``"#B27200"``.
        picture: ``(H, W, 3)`` RGB bytes.
        tolerance: largest difference in a channel.
    """
    rgb = 255 * np.array(to_rgb(color))
    return float((np.abs(picture - rgb).max(-1) <= tolerance).mean())


def share_beside_background(picture: np.ndarray, tolerance: int = 8) -> float:
    """Measure the share of pixels that differ from the picture's main color."""
    colors, counts = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
    main = colors[counts.argmax()].astype(int)
    return float((np.abs(picture - main).max(-1) > tolerance).mean())
