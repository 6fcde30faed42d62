"""WebM video files, which browsers play."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from marl_pool.envs.drawing.canvas import INK, PAPER, opencv
from marl_pool.utils.atomic import new_path
from marl_pool.utils.errors import InputError
from marl_pool.utils.silence import silenced

CODEC = "VP90"  # VP9: OpenCV's wheels write it, and browsers play it


def write_webm(path: Path, frames: Iterable[np.ndarray], fps: float) -> None:
    """Write a WebM file, which appears when it is complete.

    Args:
        path: path of the file; without frames it is not written.
        frames: ``(height, width, 3)`` uint8 RGB, all of one size.
        fps: frames per second.

    Raises:
        InputError: OpenCV without VP9.
    """
    cv2, video = opencv(), None
    # OpenCV opens files by name and would follow a link: write beside the path.
    with new_path(path) as beside:
        try:
            for image in frames:
                # Open the file when the size of the frames is known.
                if video is None:
                    codec, size = cv2.VideoWriter_fourcc(*CODEC), image.shape[1::-1]
                    # It warns on stderr that WebM has no tag for VP9, which needs none.
                    with silenced():
                        video = cv2.VideoWriter(str(beside), codec, fps, size)
                    if not video.isOpened():
                        raise InputError(
                            f"{path}: OpenCV {cv2.__version__} cannot write VP9; "
                            "install opencv-python-headless"
                        )
                # OpenCV expects blue first.
                video.write(image[..., ::-1])
        finally:
            if video is not None:
                video.release()


def with_caption(image: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Write lines of text below an image.

    Args:
        image: ``(height, width, 3)`` uint8 RGB.
        lines: ASCII text, the only characters of OpenCV's fonts.

    Returns:
        A taller image with even sides, as VP9's chroma subsampling needs.
    """
    cv2 = opencv()
    height, width = image.shape[:2]
    line = max(12, width // 28)
    low = height + (len(lines) + 1) * line
    framed = np.full((low + low % 2, width + width % 2, 3), PAPER, np.uint8)
    framed[:height, :width] = image
    for row, text in enumerate(lines):
        at = (line // 2, height + (row + 1) * line + line // 4)
        font = cv2.FONT_HERSHEY_SIMPLEX
        cv2.putText(framed, text, at, font, line / 36, INK, 1, cv2.LINE_AA)
    return framed
