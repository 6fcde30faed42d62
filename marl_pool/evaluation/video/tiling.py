"""Grids of episodes that advance in lockstep."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

GAP = 6
"""Pixels between two images; even, as the codecs' chroma subsampling needs."""


def grid_frames(grid: Sequence[Sequence[Iterator[np.ndarray]]]) -> Iterator[np.ndarray]:
    """Advance all episodes of a grid until the last one ends.

    An episode that has ended keeps its last frame.

    Args:
        grid: rows of frames of one size, each from one episode; all rows are of equal
            length.

    Yields:
        Images ``(height, width, 3)`` uint8, each the whole grid.
    """
    columns = len(grid[0])
    images: Sequence[np.ndarray] = ()
    for frames in zip_longest(*(episode for row in grid for episode in row)):
        # Exhausted episodes yield None, and keep their last frame.
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
    parts = [part for image in images for part in (white, image)]
    return np.concatenate(parts[1:], axis)
