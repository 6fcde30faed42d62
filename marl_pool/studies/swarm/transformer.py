"""The SWARM transformer: an image, pixel by pixel, without attention."""

import itertools
import math

import torch
from torch import Tensor, nn

from marl_pool.encoders.swarm import SwarmLayer
from marl_pool.networks import seeded
from marl_pool.utils.errors import InputError

EMBEDDING = 0.1
"""Initial embeddings are uniform in (-0.1, 0.1), as in the published code; there those
of channels begin at zero."""


class SwarmTransformer(nn.Module):
    """Logits of every pixel, from those before it.

    ``x_i = E[pixel_{i-1}] + P(place_i) + K[channel_i] + C[class]`` goes through causal
    SWARM layers with ReLU between them. The inputs are shifted by one, so no logit
    depends on its own pixel or a later one; before the first pixel E is zero. Pixels
    are read along the scan lines, a pixel's channels one after the other.

    Source: SWARM (Vollgraf, 2019), section 4.3. Positions are fixed sinusoids of row
    and column, as wide as the trainable embeddings and added to them; their
    frequencies are those of the published code (`sinusoids`).

    Args:
        shape: height, width and channels of the images.
        num_levels: intensities.
        num_classes: of labels; 0: the images have none.
        width: of the embeddings, a multiple of 4.
        units: of each pixel's memory.
        iterations: of each layer.
        num_layers: at least 1; the paper has one.
        seed: of the initial weights.

    Raises:
        InputError: a width that is no multiple of 4.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_levels: int,
        *,
        num_classes: int = 0,
        width: int = 256,
        units: int = 256,
        iterations: int = 5,
        num_layers: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_width(width)
        self.shape = shape
        self.places: Tensor
        self.register_buffer("places", sinusoids(shape, width), persistent=False)
        with seeded(seed, "embedding"):
            self.intensities = _embedding(num_levels, width)
            self.channels = _embedding(shape[2], width) if shape[2] > 1 else None
            self.classes = _embedding(num_classes, width) if num_classes else None
        widths = [width] * num_layers + [num_levels]
        with seeded(seed, "layers"):
            self.layers = nn.ModuleList(
                SwarmLayer(before, units, after, iterations, "causal")
                for before, after in itertools.pairwise(widths)
            )
        self.units, self.iterations = units, iterations

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits of every pixel.

        Args:
            pixels: ``(B, L)`` int64 in [0, num_levels), along the scan lines.
            labels: ``(B,)`` int64; None if the images have none.

        Returns:
            ``(B, L, num_levels)``; those at i depend on ``pixels[:, :i]`` alone.
        """
        before = nn.functional.pad(self.intensities(pixels[:, :-1]), (0, 0, 1, 0))
        x = before + self.known(labels)
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x)
        return x

    @torch.no_grad()
    def sample(
        self, count: int, labels: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Draw images pixel by pixel.

        Each pixel costs the same, however many came before: of those, running sums of
        hidden states are kept (`SwarmLayer.step`).

        Args:
            count: B, of the images.
            labels: ``(B,)`` int64; None if the images have none.
            generator: on the network's device.

        Returns:
            ``(B, H, W, C)`` int64 in [0, num_levels).
        """
        known = self.known(labels).expand(count, -1, -1)
        memory = self.empty_memory(count)
        drawn: list[Tensor] = []
        for place in range(known.shape[1]):
            last = drawn[-1] if drawn else None
            probabilities = self.step(last, known[:, place], memory, place).softmax(-1)
            drawn.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
        return torch.stack(drawn, 1).unflatten(1, self.shape)

    def step(
        self, last: Tensor | None, known: Tensor, memory: Tensor, place: int
    ) -> Tensor:
        """Return the logits ``(B, num_levels)`` of the pixel at ``place``.

        Args:
            last: ``(B,)``, the pixel before; None at the first.
            known: ``(B, width)``, position, channel and class of this one.
            memory: of `empty_memory`; changed in place.
            place: how many pixels came before.
        """
        x = known if last is None else known + self.intensities(last)
        for number, (layer, sums) in enumerate(zip(self.layers, memory, strict=True)):
            assert isinstance(layer, SwarmLayer)
            x = layer.step(x.relu() if number else x, sums, place)
        return x

    def empty_memory(self, count: int) -> Tensor:
        """Sums before the first pixel, ``(layers, iterations - 1, B, units)``."""
        size = (len(self.layers), self.iterations - 1, count, self.units)
        return self.places.new_zeros(size)

    def known(self, labels: Tensor | None) -> Tensor:
        """Return the queries of all pixels, ``(1 or B, L, width)``."""
        x = self.places
        if self.channels is not None:
            x = x + self.channels.weight.repeat(len(x) // self.shape[2], 1)
        if self.classes is None:
            return x[None]
        assert labels is not None
        return x + self.classes(labels)[:, None]


def check_width(width: int) -> None:
    """Refuse embeddings whose width `sinusoids` cannot have."""
    if width % 4:
        raise InputError(f"task.width: expected a multiple of 4, got {width}")


def sinusoids(shape: tuple[int, int, int], width: int) -> Tensor:
    """Fixed encodings of the pixels' rows and columns, ``(H W C, width)``.

    For each of ``width / 4`` frequencies f, from 1 to W / 2 cycles an image in equal
    ratios: the sines of ``2 π f column / W`` and of ``2 π f row / W``, then the
    cosines of both; W is the width of the image, for f the larger of width and height.

    Source: the published code of SWARM; its text refers to the Image Transformer.

    Args:
        shape: height, width and channels; a pixel's channels have one place.
        width: of an encoding, a multiple of 4.
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
