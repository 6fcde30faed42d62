"""Grids of episodes that advance in lockstep."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from marl_pool.rollout import Transition

GAP = 6
"""Pixels between two images; even, as VP9's chroma subsampling needs."""


class Tile:
    """One episode, played as its frames are needed.

    Args:
        transitions: transitions of the episode.
        draw: appends the frames of a transition to ``frames``.
        frames: queue of frames that are not shown yet.
    """

    def __init__(
        self,
        transitions: Iterator[Transition],
        draw: Callable[[Transition], None],
        frames: deque[np.ndarray],
    ) -> None:
        self._transitions, self._draw, self._frames = transitions, draw, frames
        self.image: np.ndarray | None = None

    def advance(self) -> bool:
        """Show the next frame; at the end keep the last one and return False."""
        if not self._frames:
            transition = next(self._transitions, None)
            if transition is None:
                return False
            self._draw(transition)
        self.image = self._frames.popleft()
        return True


def grid_frames(grid: Sequence[Sequence[Tile]]) -> Iterator[np.ndarray]:
    """Play all episodes of a grid until the last one ends.

    Args:
        grid: rows of tiles with images of one size.

    Yields:
        Images ``(height, width, 3)`` uint8, each the whole grid.
    """
    tiles = [tile for row in grid for tile in row]
    while True:
        moved = [tile.advance() for tile in tiles]
        if not any(moved):
            return
        yield _join(grid)


def _join(grid: Sequence[Sequence[Tile]]) -> np.ndarray:
    rows = [
        _concatenate([tile.image for tile in tiles if tile.image is not None], axis=1)
        for tiles in grid
    ]
    return _concatenate(rows, axis=0)


def _concatenate(images: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """Concatenate images along an axis with white gaps."""
    shape = list(images[0].shape)
    shape[axis] = GAP
    white = np.full(shape, 255, np.uint8)
    parts = [part for image in images for part in (white, image)]
    return np.concatenate(parts[1:], axis)
