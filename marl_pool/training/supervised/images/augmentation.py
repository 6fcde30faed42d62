"""Random crops and flips of images ``(B, H, W, C)``.

The random numbers come from a generator on the CPU, so a seed gives the same crops and
flips on every device.
"""

import torch
from torch import Tensor


def random_crops(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Cut a window of the images' own size out of each image with a border of zeros.

    The border is ``padding`` pixels wide on each side; each of the
    ``(2 padding + 1)²`` positions of the window is equally likely.
    """
    count, height, width, _ = images.shape
    border = (0, 0, padding, padding, padding, padding)
    padded = torch.nn.functional.pad(images, border)
    # Sample a corner for each image, and select its window.
    corners = torch.randint(2 * padding + 1, (2, count), generator=generator)
    top, left = corners.to(images.device)
    # A view of all windows, (B, 2 padding + 1, 2 padding + 1, C, H, W).
    windows = padded.unfold(1, height, 1).unfold(2, width, 1)
    rows = torch.arange(count, device=images.device)
    return windows[rows, top, left].permute(0, 2, 3, 1)


def random_flips(
    images: Tensor, probability: float, generator: torch.Generator
) -> Tensor:
    """Mirror each image, left to right, with a probability in [0, 1]."""
    flipped = torch.rand(len(images), generator=generator) < probability
    where = flipped.to(images.device)[:, None, None, None]
    return torch.where(where, images.flip(2), images)
