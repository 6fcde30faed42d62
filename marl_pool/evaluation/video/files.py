"""Video files: WebM, MP4, GIF and animated WebP."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from marl_pool.envs.drawing.canvas import opencv
from marl_pool.utils.atomic import new_path
from marl_pool.utils.errors import InputError
from marl_pool.utils.silence import silenced

CODECS = {".webm": "VP80", ".mp4": "vp09"}
"""Codecs that OpenCV's wheels write and browsers play; the wheels lack H.264.

MP4 has no VP8, which takes a fifth of VP9's time here, for files a third larger.
"""
QUALITY = 60
"""Of WebP, from 0 to 100; text stays legible."""


def write_frames(path: Path, frames: Iterable[np.ndarray], fps: float) -> None:
    """Write a video file, which appears when it is complete.

    OpenCV writes ``.webm`` and ``.mp4`` frame by frame; Pillow, which Matplotlib
    installs, writes ``.gif`` and ``.webp`` from memory, and they repeat forever.

    Args:
        path: path of the file; without frames it is not written.
        frames: ``(height, width, 3)`` uint8 RGB, all of one size.
        fps: frames per second; GIFs round their duration to 10 ms.

    Raises:
        InputError: OpenCV without the codec.
    """
    remaining = iter(frames)
    # Libraries open files by name and would follow a link: write beside the path.
    with new_path(path) as beside:
        if (first := next(remaining, None)) is None:
            return
        write = _write_video if path.suffix in CODECS else _write_animation
        write(beside, first, remaining, fps)


def _write_video(
    path: Path, first: np.ndarray, rest: Iterator[np.ndarray], fps: float
) -> None:
    cv2 = opencv()
    codec = cv2.VideoWriter_fourcc(*CODECS[path.suffix])
    # It warns on stderr that WebM has no tag for VP8, which needs none.
    with silenced():
        video = cv2.VideoWriter(str(path), codec, fps, first.shape[1::-1])
    if not video.isOpened():
        raise InputError(
            f"{path.name}: OpenCV {cv2.__version__} cannot write {path.suffix}; "
            "install opencv-python-headless"
        )
    try:
        for image in chain((first,), rest):
            video.write(image[..., ::-1])  # OpenCV expects blue first
    finally:
        video.release()


def _write_animation(
    path: Path, first: np.ndarray, rest: Iterator[np.ndarray], fps: float
) -> None:
    from PIL import Image

    Image.fromarray(first).save(
        path,
        save_all=True,
        append_images=[Image.fromarray(image) for image in rest],
        duration=round(1000 / fps),  # milliseconds
        loop=0,
        quality=QUALITY,
        method=4,
    )
