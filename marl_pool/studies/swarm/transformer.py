"""SWARM transformer: an autoregressive image model without attention."""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from marl_pool.encoders.swarm import SwarmLayer
from marl_pool.networks import seeded

EMBEDDING = 0.1
"""Initial embeddings are uniform in (-0.1, 0.1), as in the published code; there those
of channels begin at zero."""

Width = Annotated[
    int, Field(ge=4, multiple_of=4, description="a positive multiple of 4")
]


class SwarmTransformer(nn.Module):
    """Map the pixels of an image to logits of the next ones.

    ``x_i = E[pixel_{i-1}] + P(position_i) + K[channel_i] + C[class]`` passes through a
    causal SWARM layer. The inputs are shifted by one, so no logit depends on its own
    pixel or a later one; for the first pixel E is zero. Pixels are in row-major order,
    a pixel's channels one after the other.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.3.
    Positions are fixed sinusoids of row and column, as wide as the trainable embeddings
    and added to them; their frequencies are those of the published code (`sinusoids`).

    Args:
        shape: height, width and channels of the images.
        num_levels: number of intensities.
        num_classes: number of classes.
        width: width of the embeddings, a multiple of 4.
        units: width of each pixel's memory.
        iterations: iterations of the SWARM layer.
        seed: seed of the initial weights.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_levels: int,
        *,
        num_classes: int,
        width: int = 256,
        units: int = 256,
        iterations: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.places: Tensor
        # Fixed encodings of row and column.
        self.register_buffer("places", sinusoids(shape, width), persistent=False)
        with seeded(seed, "embedding"):
            self.intensities = _embedding(num_levels, width)
            self.channels = _embedding(shape[2], width) if shape[2] > 1 else None
            self.classes = _embedding(num_classes, width)
        # The layer outputs a logit for each level of intensity.
        with seeded(seed, "layers"):
            self.layer = SwarmLayer(width, units, num_levels, iterations, "causal")
        self.units, self.iterations = units, iterations

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Compute the logits of every pixel, ``(B, L, num_levels)``.

        Those at i depend only on ``pixels[:, :i]``.

        Args:
            pixels: ``(B, L)`` int64 in [0, num_levels), in row-major order.
            labels: ``(B,)`` int64.
        """
        # Shift the pixels by one, so that no logit depends on its own pixel.
        previous = nn.functional.pad(self.intensities(pixels[:, :-1]), (0, 0, 1, 0))
        logits: Tensor = self.layer(previous + self.known(labels))
        return logits

    @torch.no_grad()
    def sample(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Sample images pixel by pixel, ``(B, H, W, C)`` int64 in [0, num_levels).

        All pixels have the same cost, because earlier ones are represented by running
        sums of hidden states (`SwarmLayer.step`).

        Args:
            labels: ``(B,)`` int64.
            generator: source of random numbers, on the network's device.
        """
        known, memory = self.known(labels), self.empty_memory(len(labels))
        pixels: list[Tensor] = []
        # Keep running sums instead of all earlier pixels.
        for place in range(known.shape[1]):
            last = pixels[-1] if pixels else None
            shares = self.step(last, known[:, place], memory, place).softmax(-1)
            pixels.append(torch.multinomial(shares, 1, generator=generator)[:, 0])
        return torch.stack(pixels, 1).unflatten(1, self.shape)

    def step(
        self, last: Tensor | None, known: Tensor, memory: Tensor, place: int
    ) -> Tensor:
        """Compute the logits ``(B, num_levels)`` of the pixel at index ``place``.

        ``last (B,)`` is the previous pixel, None at the first one; ``known (B, width)``
        the embedding of position, channel and class; ``memory``, from `empty_memory`,
        is updated in place.
        """
        x = known if last is None else known + self.intensities(last)
        return self.layer.step(x, memory, place)

    def empty_memory(self, count: int) -> Tensor:
        """Return the initial sums, ``(iterations - 1, B, units)``."""
        return self.places.new_zeros(self.iterations - 1, count, self.units)

    def known(self, labels: Tensor) -> Tensor:
        """Embed position, channel and class of all pixels, ``(B, L, width)``."""
        x = self.places
        if self.channels is not None:
            x = x + self.channels.weight.repeat(len(x) // self.shape[2], 1)
        return x + self.classes(labels)[:, None]


def sinusoids(shape: tuple[int, int, int], width: int) -> Tensor:
    """Return fixed encodings of the pixels' rows and columns, ``(H W C, width)``.

    They are, for each of ``width / 4`` frequencies f: the sines of ``2 π f column / W``
    and ``2 π f row / W``, then the cosines of both. The frequencies are geometrically
    spaced from 1 to ``max(H, W) / 2`` cycles an image.

    Source: the published code of SWARM; its text refers to the Image Transformer
    (https://arxiv.org/abs/1802.05751).

    Args:
        shape: height, width and channels; a pixel's channels share an encoding.
        width: width of an encoding, a multiple of 4.
    """
    height, columns, channels = shape
    highest = math.log10(max(height, columns) / 2)
    cycles = torch.logspace(0, highest, width // 4, dtype=torch.float64)
    row, column = torch.meshgrid(
        torch.arange(height), torch.arange(columns), indexing="ij"
    )
    places = torch.stack([column.flatten(), row.flatten()], -1) / columns
    angles = 2 * math.pi * cycles[:, None] * places[:, None].double()
    waves = torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
    return waves.to(torch.get_default_dtype()).repeat_interleave(channels, 0)


def _embedding(count: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(count, width)
    nn.init.uniform_(embedding.weight, -EMBEDDING, EMBEDDING)
    return embedding
