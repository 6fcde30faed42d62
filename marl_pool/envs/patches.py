"""Screens cut into patches: tokens without positions, and pictures of the attention."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.drawing.canvas import ATTENTION, FOCUS, Color, opencv
from marl_pool.tokens import Tokens, TokenSpec

OPACITY = 0.8
"""Opacity of the tint of a patch with all the attention."""
OUTLINE: Color = (255, 60, 60)


class PatchGrid(NamedTuple):
    """A square screen cut into patches, in rows from the upper left."""

    screen: int
    """Height and width in pixels."""
    patch: int
    """Height and width of a patch in pixels."""
    stride: int
    """Pixels from a patch to the next one."""

    @property
    def side(self) -> int:
        """Number of patches along a side."""
        return (self.screen - self.patch) // self.stride + 1

    def corner(self, token: int) -> tuple[int, int]:
        """Return the left and upper pixel of a patch."""
        row, column = divmod(token, self.side)
        return column * self.stride, row * self.stride


def patch_tokens(screens: Tensor, grid: PatchGrid) -> Tokens:
    """Cut stacked screens into patches, one token each, by rows from the upper left.

    The features are frame-major: the pixels of the oldest frame, row by row and with
    the colors of a pixel side by side, then the next frame. All tokens have
    the same type, and none contains its position.

    Args:
        screens: ``(num_envs, num_frames, height, width, colors)`` uint8.
        grid: the patches of a screen.
    """
    windows = screens.unfold(2, grid.patch, grid.stride)
    windows = windows.unfold(3, grid.patch, grid.stride)
    # (E, frames, down, across, colors, y, x) to (E, down, across, frames, y, x, colors)
    patches = windows.permute(0, 2, 3, 1, 5, 6, 4)
    num_tokens = patches.shape[1] * patches.shape[2]
    features = patches.reshape(len(screens), 1, num_tokens, -1)
    types = torch.zeros(features.shape[:3], dtype=torch.int64, device=screens.device)
    return Tokens(features, types, types.bool())


def patch_spec(grid: PatchGrid, num_frames: int, colors: int) -> TokenSpec:
    """Describe `patch_tokens`; ``colors``: channels of a pixel."""
    return TokenSpec(
        grid.side**2,
        num_frames * grid.patch**2 * colors,
        ("patch",),
        has_self=False,
        dtype="uint8",
        num_frames=num_frames,
    )


def outline(image: np.ndarray, grid: PatchGrid, tokens: Iterable[int]) -> np.ndarray:
    """Return a copy of a square image with the patches ``tokens`` outlined."""
    cv2, framed = opencv(), image.copy()
    scale = len(image) / grid.screen
    width = max(1, round(scale / 3))
    for token in tokens:
        x, y = grid.corner(token)
        first = round(x * scale), round(y * scale)
        last = (round((at + grid.patch) * scale) - 1 for at in (x, y))
        cv2.rectangle(framed, first, tuple(last), OUTLINE, width)
    return framed


def draw(
    screen: np.ndarray, weights: np.ndarray | None, grid: PatchGrid, size: int
) -> np.ndarray:
    """Enlarge a screen and tint its patches by their attention weights.

    A weight is measured in multiples of uniform attention, so that uniform attention
    looks faint. Where patches overlap, the largest weight counts.

    Args:
        screen: ``(height, height)`` uint8 grey, or ``(height, height, 3)`` RGB.
        weights: ``(N,)`` attention weights in [0, 1]; None for no tint.
        grid: patches of the screen.
        size: height and width of the image in pixels.
    """
    cv2 = opencv()
    image = screen if screen.ndim == 3 else np.repeat(screen[..., None], 3, axis=2)
    if weights is not None:
        opacity = np.zeros((grid.screen, grid.screen, 1))
        tints = OPACITY * (1 - np.exp(-weights * len(weights) / FOCUS))
        for token, tint in enumerate(tints):
            x, y = grid.corner(token)
            covered = opacity[y : y + grid.patch, x : x + grid.patch]
            np.maximum(covered, tint, out=covered)
        image = np.rint(opacity * ATTENTION + (1 - opacity) * image).astype(np.uint8)
    larger: np.ndarray = cv2.resize(
        image, (size, size), interpolation=cv2.INTER_NEAREST
    )
    return larger
