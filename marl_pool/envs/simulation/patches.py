"""Image patches as tokens without positions."""

import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.drawing.patches import PatchGrid
from marl_pool.tokens import Tokens, TokenSpec


def patch_tokens(screens: Tensor, grid: PatchGrid) -> Tokens:
    """Cut stacked screens into patches, one token each, by rows from the upper left.

    The features are frame-major: the pixels of the oldest frame, row by row and with
    the colors of a pixel side by side, then those of the next frame. All tokens have
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


def patch_group(
    grid: PatchGrid,
    num_frames: int,
    *,
    colors: int,
    action_space: spaces.Box | spaces.Discrete,
) -> AgentGroup:
    """Describe the one agent that observes `patch_tokens`."""
    spec = TokenSpec(
        grid.side**2,
        num_frames * grid.patch**2 * colors,
        ("patch",),
        has_self=False,
        dtype="uint8",
        num_frames=num_frames,
    )
    return AgentGroup(1, spec, action_space)
