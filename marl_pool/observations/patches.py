"""Images cut into patches."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def cut_patches(images: Tensor, patch: int, dtype: torch.dtype) -> Tensor:
    """Cut images into square patches without overlap, by rows from the upper left.

    Args:
        images: ``(*B, H, W, C)``.
        patch: height and width of a patch; the image is padded with zeros to a multiple
            of it, at the bottom and right.
        dtype: of the result.

    Returns:
        ``(*B, patches, patch * patch * C)``; pixels by rows, each with its channels.
    """
    *batch, height, width, channels = images.shape
    rows, columns = -(-height // patch), -(-width // patch)
    added = (0, 0, 0, columns * patch - width, 0, rows * patch - height)
    filled = pad(images.to(dtype), added)
    cut = filled.reshape(*batch, rows, patch, columns, patch, channels)
    # (*B, rows, y, columns, x, C) to (*B, rows, columns, y, x, C)
    ordered = cut.transpose(-4, -3)
    return ordered.reshape(*batch, rows * columns, patch * patch * channels)


def join_patches(patches: Tensor, patch: int, size: tuple[int, int]) -> Tensor:
    """Join patches into images; the inverse of `cut_patches`.

    Args:
        patches: ``(*B, patches, patch * patch * C)``.
        patch: height and width of a patch.
        size: height and width of an image, without the padding of its patches.

    Returns:
        ``(*B, H, W, C)``.
    """
    height, width = size
    rows, columns = -(-height // patch), -(-width // patch)
    *batch, _, numbers = patches.shape
    channels = numbers // patch**2
    cut = patches.reshape(*batch, rows, columns, patch, patch, channels)
    # (*B, rows, columns, y, x, C) to (*B, rows, y, columns, x, C)
    filled = cut.transpose(-4, -3)
    images = filled.reshape(*batch, rows * patch, columns * patch, channels)
    return images[..., :height, :width, :]
