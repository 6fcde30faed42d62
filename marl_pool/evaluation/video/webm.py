"""WebM video files, which browsers play."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from marl_pool.envs.drawing.canvas import INK, PAPER, opencv
from marl_pool.utils.atomic import new_path
from marl_pool.utils.errors import InputError

CODEC = "VP90"  # VP9: OpenCV's wheels write it, and browsers play it


class VideoWriter:
    """Context manager that writes frames to a WebM file and publishes it at the end."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps, self.written = path, fps, 0
        self._cv2 = opencv()
        # OpenCV opens files by name and would follow a link: write beside the path.
        self._opened = new_path(path)
        self._beside = path
        self._video: Any = None

    def write(self, image: np.ndarray) -> None:
        """Append a frame, ``(height, width, 3)`` uint8 RGB; all have the same size.

        Raises:
            InputError: OpenCV without VP9.
        """
        # The first frame determines the size.
        if self._video is None:
            height, width = image.shape[:2]
            codec = self._cv2.VideoWriter_fourcc(*CODEC)
            with _silent():
                self._video = self._cv2.VideoWriter(
                    str(self._beside), codec, self.fps, (width, height)
                )
            if not self._video.isOpened():
                raise InputError(
                    f"{self.path}: OpenCV {self._cv2.__version__} cannot write VP9; "
                    "install opencv-python-headless"
                )
        self._video.write(image[..., ::-1])
        self.written += 1

    def __enter__(self) -> "VideoWriter":
        self._beside = self._opened.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._video is not None:
            self._video.release()
        self._opened.__exit__(kind, error, traceback)


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


@contextmanager
def _silent() -> Iterator[None]:
    """Redirect the process's stderr to the null device.

    OpenCV's C code warns there that WebM has no tag for VP9, which needs none.
    """
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
