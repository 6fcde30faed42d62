"""Images cut into patches."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def cut_patches(images: Tensor, patch: int, dtype: torch.dtype) -> Tensor:
    """Cut images into square patches that do not overlap, by rows from the upper left.

    Args:
        images: ``(*B, H, W, C)``.
        patch: height and width of a patch; the image is filled with zeros to a multiple
            of it, at the lower and right edge.
        dtype: of the result.

    Returns:
        ``(*B, patches, patch * patch * C)``; pixels by rows, channels side by side.
    """
    *batch, height, width, channels = images.shape
    rows, columns = -(-height // patch), -(-width // patch)
    added = (0, 0, 0, columns * patch - width, 0, rows * patch - height)
    filled = pad(images.to(dtype), added)
    cut = filled.reshape(*batch, rows, patch, columns, patch, channels)
    # (*B, rows, y, columns, x, C) to (*B, rows, columns, y, x, C)
    ordered = cut.transpose(-4, -3)
    return ordered.reshape(*batch, rows * columns, patch * patch * channels)
