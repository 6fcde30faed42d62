"""Frames of a video: their captions, grids of frames, and video files."""

import errno
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_pool.envs.drawing.canvas import INK, PAPER, opencv, width_of, write
from marl_pool.envs.drawing.marks import DRAWERS, Glyphs, draw_slots
from marl_pool.files.atomic import new_path
from marl_pool.perturbations.perception import Mark, Perception
from marl_pool.utils.errors import InputError
from marl_pool.utils.silence import silenced

GAP = 6
"""Pixels between two images; even, as the codecs' chroma subsampling needs."""
CODECS = {".webm": "VP80", ".mp4": "vp09"}
"""Codecs that OpenCV's wheels write and browsers play; the wheels lack H.264.

VP8, which MP4 cannot hold, takes a fifth of VP9's time, for files a third larger.
"""
QUALITY = 60
"""WebP quality, from 0 to 100; text stays legible."""


class Caption(NamedTuple):
    """Content of the margin below a frame, equally high in all frames of a video."""

    lines: Sequence[str]
    """ASCII text, the only characters of OpenCV's fonts."""
    label: str = ""
    """What happened to marked tokens: the label of a `Perception`."""
    legend: Collection[Mark] = ()
    """Marks to explain."""
    legend_rows: int = 0
    """Lines reserved for the legend."""
    perception: Perception | None = None
    """Tokens to show as a row of cells; None for an empty row."""
    glyphs: Glyphs | None = None
    """Their appearance in the frame, if it shows them."""


def with_caption(image: np.ndarray, caption: Caption) -> np.ndarray:
    """Add a margin with a caption below an image ``(height, width, 3)`` uint8 RGB.

    Returns:
        A taller image with even sides, as the codecs' chroma subsampling needs.
    """
    height, width = image.shape[:2]
    line = _line(width)
    # Two lines for the row of tokens, then text and legend, and room for descenders.
    low = height + (2 + len(caption.lines) + caption.legend_rows) * line + line // 2
    framed = np.full((low + low % 2, width + width % 2, 3), PAPER, np.uint8)
    framed[:height, :width] = image
    if caption.perception is not None:
        below = framed[:, :width]
        top = height + line // 2
        draw_slots(below, top, line, caption.perception, caption.glyphs)
    baseline = height + 2 * line + line // 2
    for text in caption.lines:
        baseline += line
        _write_fitting(framed, text, (line // 2, baseline - line // 2), line)
    if caption.legend:
        _write_legend(framed, baseline + line // 2, line, caption)
    return framed


def with_steps(images: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Write the number of the step above each image, once for a whole grid."""
    for step, image in enumerate(images):
        line = _line(min(image.shape[1], 560))
        height = 2 * (line * 3 // 4)  # even, like the image's
        header = np.full((height, *image.shape[1:]), PAPER, np.uint8)
        write(header, f"step {step}", (line // 2, line), line)
        yield np.concatenate((header, image))


def _line(width: int) -> int:
    """Return the height of a line of text below an image of this width."""
    return max(12, width // 28)


def _write_legend(
    image: np.ndarray, baseline: int, line: int, caption: Caption
) -> None:
    """Write the label and each mark with its meaning, in as many lines as it takes."""
    x = line // 2
    x += _write_fitting(image, f"{caption.label}:", (x, baseline), line) + line // 2
    for mark in Mark:
        if mark not in caption.legend:
            continue
        width = round(2.5 * line) + width_of(mark.value, line)
        if x + width > image.shape[1] and x > line:
            x, baseline = line // 2, baseline + line
        at = np.array((x + 0.7 * line, baseline - 0.35 * line))
        DRAWERS[mark](image, at, line / 4, INK)
        at_text = (x + round(1.6 * line), baseline)
        _write_fitting(image, mark.value, at_text, line)
        x += width


def _write_fitting(image: np.ndarray, text: str, at: tuple[int, int], line: int) -> int:
    """Write text in a line, smaller if it would not fit; return its width."""
    width, room = width_of(text, line), image.shape[1] - at[0] - line // 4
    return write(image, text, at, line * min(1.0, room / max(width, 1)), INK)


def grid_frames(grid: Sequence[Sequence[Iterator[np.ndarray]]]) -> Iterator[np.ndarray]:
    """Advance all episodes of a grid until the last one ends.

    An episode that has ended keeps its last frame. All rows have the same length, and
    all frames the same size.

    Yields:
        Images ``(height, width, 3)`` uint8, each the whole grid.
    """
    columns = len(grid[0])
    images: Sequence[np.ndarray] = ()
    for frames in zip_longest(*(episode for row in grid for episode in row)):
        # Finished episodes yield None, and keep their last frame.
        images = [
            last if new is None else new
            for new, last in zip(frames, images or frames, strict=True)
        ]
        rows = (images[i : i + columns] for i in range(0, len(images), columns))
        yield _concatenate([_concatenate(row, axis=1) for row in rows], axis=0)


def _concatenate(images: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """Concatenate images along an axis with white gaps."""
    shape = list(images[0].shape)
    shape[axis] = GAP
    white = np.full(shape, 255, np.uint8)
    tiles = [tile for image in images for tile in (white, image)]
    return np.concatenate(tiles[1:], axis)


def write_frames(path: Path, frames: Iterable[np.ndarray], fps: float) -> None:
    """Write a video file, which appears once it is complete.

    OpenCV writes ``.webm`` and ``.mp4`` frame by frame; Pillow, which Matplotlib
    installs, writes ``.gif`` and ``.webp`` from memory, and they repeat forever.

    Args:
        path: path of the file; without frames it is not written.
        frames: ``(height, width, 3)`` uint8 RGB, all of one size.
        fps: frames per second. The frames of a GIF last a multiple of 10 ms, at least
            20, below which browsers show them for 100.

    Raises:
        InputError: OpenCV without the codec.
        OSError: a file that cannot be written whole, as on a full disk.
    """
    remaining = iter(frames)
    # Libraries open files by name and would follow a link: write beside the path.
    with new_path(path) as beside:
        if (first := next(remaining, None)) is None:
            return
        if path.suffix in CODECS:
            _write_video(beside, first, remaining, fps)
            return
        from PIL import Image

        # Milliseconds of a frame, which Pillow would cut to a multiple of 10 for GIFs.
        is_gif = path.suffix == ".gif"
        duration = max(20, 10 * round(100 / fps)) if is_gif else round(1000 / fps)
        # Endless repetition, and the compression of WebP.
        options: dict[str, Any] = {"loop": 0, "quality": QUALITY, "method": 4}
        options["duration"] = duration
        later_frames = list(map(Image.fromarray, remaining))
        picture = Image.fromarray(first)
        picture.save(beside, save_all=True, append_images=later_frames, **options)


def _write_video(
    path: Path, first: np.ndarray, later_frames: Iterator[np.ndarray], fps: float
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
    count = 0
    # On a full disk it warns at every frame.
    logging = cv2.utils.logging
    level = logging.setLogLevel(logging.LOG_LEVEL_ERROR)
    try:
        for image in chain((first,), later_frames):
            video.write(image[..., ::-1])  # OpenCV expects blue first
            count += 1
    finally:
        video.release()
        logging.setLogLevel(level)
    # OpenCV does not report a full disk.
    with silenced():
        written = cv2.VideoCapture(str(path))
        is_whole = all(written.grab() for _ in range(count))
        written.release()
    if not is_whole:
        reason = "not all frames could be written; the disk may be full"
        raise OSError(errno.EIO, reason)
