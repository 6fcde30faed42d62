"""Several episodes side by side in one picture, all at the same step."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from marl_pool.rollout import Transition

GAP = 6
"""Pixels between two pictures; even, as VP9's colors want them."""


class Tile:
    """One episode's frames, played when they are asked for.

    Args:
        moments: of the episode.
        draw: is told of each moment and appends to ``frames``.
        frames: drawn and not yet shown.
    """

    def __init__(
        self,
        transitions: Iterator[Transition],
        draw: Callable[[Transition], None],
        frames: deque[np.ndarray],
    ) -> None:
        self._moments, self._draw, self._frames = transitions, draw, frames
        self.image: np.ndarray | None = None

    def advance(self) -> bool:
        """Go on to the next frame; at the end keep the last one and return False."""
        if not self._frames:
            transition = next(self._moments, None)
            if transition is None:
                return False
            self._draw(transition)
        self.image = self._frames.popleft()
        return True


def frames_of(grid: Sequence[Sequence[Tile]]) -> Iterator[np.ndarray]:
    """Play all episodes of a grid until the last one is over.

    Args:
        grid: rows of tiles whose pictures have one size.

    Yields:
        Pictures ``(height, width, 3)`` uint8; a single tile's are its own.
    """
    tiles = [tile for row in grid for tile in row]
    while True:
        moved = [tile.advance() for tile in tiles]
        if not any(moved):
            return
        yield _joined(grid)


def _joined(grid: Sequence[Sequence[Tile]]) -> np.ndarray:
    rows = []
    for tiles in grid:
        images = [tile.image for tile in tiles if tile.image is not None]
        rows.append(_apart(images, axis=1))
    return _apart(rows, axis=0)


def _apart(images: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """Pictures in a row or a column, white between them."""
    first, *others = images
    if not others:
        return first
    shape = list(first.shape)
    shape[axis] = GAP
    white = np.full(shape, 255, np.uint8)
    parts = [first]
    for image in others:
        parts += [white, image]
    return np.concatenate(parts, axis)
