"""Embedding of images as tokens with Fourier positions, and readout of pixels."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.encoders.merging import Refinement, merging_mlp
from marl_pool.training.supervised.images import patches


class ImageLayout(NamedTuple):
    """Layout of images as patches.

    Attributes:
        shape: height, width and channels of the images.
        patch: side of a patch, a divisor of height and width.
        bands: frequencies of the Fourier positions.
    """

    shape: tuple[int, int, int]
    patch: int
    bands: int


def fourier_positions(height: int, width: int, bands: int) -> Tensor:
    """Compute features of each pixel's position, ``(height, width, 4 bands + 2)``.

    They are the sines and cosines of ``2π y f`` and ``2π x f``, and the coordinates x
    and y in [-1, 1]. The frequencies f are evenly spaced from ``1 / max(h, w)`` to
    ``min(h, w) / 2``.

    Source: Nair and Lieck, A.2.
    """
    rows, columns = (torch.linspace(-1, 1, size) for size in (height, width))
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    low, high = 1 / max(height, width), min(height, width) / 2
    frequencies = torch.linspace(low, high, bands)
    angles = [2 * math.pi * each[..., None] * frequencies for each in (y, x)]
    waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
    return torch.cat([*waves, x[..., None], y[..., None]], -1)


class Patches(nn.Module):
    """Cut an image into patches, and project each with its pixels' positions.

    Source: Nair and Lieck, section 3.1.1. Difference: a pixel v enters as
    ``4 (v - 1/2)``. Otherwise the few pixel values have little effect among the many
    position features, and the network learns only the mean image for a long time.
    """

    def __init__(self, layout: ImageLayout, dim: int) -> None:
        super().__init__()
        height, width, channels = layout.shape
        self.patch = layout.patch
        self.positions: Tensor
        positions = fourier_positions(height, width, layout.bands)
        self.register_buffer("positions", positions, persistent=False)
        per_pixel = channels + positions.shape[-1]
        self.project = nn.Linear(per_pixel * self.patch**2, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``(B, H, W, C)``, in [0, 1], as ``(B, N, D)``, patches row by row."""
        places = self.positions.to(images.dtype).expand(len(images), -1, -1, -1)
        # Append each pixel's position to its channels, then cut.
        both = torch.cat([4 * (images - 0.5), places], -1)
        return self.project(patches(both, self.patch))


class PixelQueries(nn.Module):
    """Read pixels out of a set of tokens, by attention from their Fourier positions.

    ``h = q + Attention(LN(q), LN(x))``, then ``W LN(h + MLP(LN(h)))``. The result does
    not depend on the order of the tokens.

    Source: Nair and Lieck, section 3.1.1, after Perceiver IO
    (https://arxiv.org/abs/2107.14795), whose decoder has the residual of the queries
    and the MLP, too.
    """

    def __init__(self, layout: ImageLayout, dim: int, num_heads: int) -> None:
        super().__init__()
        height, width, channels = layout.shape
        self.size = (height, width)
        self.positions: Tensor
        positions = fourier_positions(height, width, layout.bands).flatten(0, 1)
        self.register_buffer("positions", positions, persistent=False)
        self.to_query = nn.Linear(positions.shape[-1], dim)
        self.answer = Refinement(dim, num_heads)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(dim), merging_mlp(dim, dim, 2 * dim)
        )
        self.last_norm, self.last = nn.LayerNorm(dim), nn.Linear(dim, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Read ``(B, H, W, C)`` out of ``(B, N, D)``."""
        queries = self.to_query(self.positions.to(x.dtype)).expand(len(x), -1, -1)
        answers = self.answer(queries, x)
        answers = answers + self.feedforward(answers)
        return self.last(self.last_norm(answers)).unflatten(1, self.size)
