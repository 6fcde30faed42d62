"""Autoregressive image generation by a SWARM transformer."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from marl_pool.encoders.swarm import SwarmLayer
from marl_pool.files.figures import figure_style, new_figure, save_png
from marl_pool.networks.set_network import seeded
from marl_pool.options.types import AtMost, Repeats, Size
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Split,
    validate_no_part,
)
from marl_pool_studies.image_task import ImageTask
from marl_pool_studies.images import Dataset

INTENSITIES = 256
CHUNK = 1000
"""Images to count together."""
PER_CLASS = 8
"""Samples of each class in the picture."""
EMBEDDING = 0.1
"""Initial embeddings are uniform in (-0.1, 0.1), as in the published code, where
embeddings of channels begin at zero."""


@dataclass(kw_only=True, eq=False)
class ImageGeneration(ImageTask):
    r"""Predict each pixel of an image from the earlier ones and the image's class.

    The loss is the negative log-likelihood; the metric is bits per dimension,

    .. math:: -\frac{1}{L} \sum_{i=1}^{L} \log_2 p(x_i \mid x_{<i}, c),

    over the L pixels and channels of an image of class c. It depends on ``num_levels``
    and ``size``: only the published sizes compare with published numbers.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.3; see
    `SwarmTransformer`.

    Raises:
        InputError: an encoder or a pooling head: the task has its own network.
    """

    metric = "bits_per_dim"

    dataset: Dataset = "mnist"
    """Data set, whose files are in ``data_dir``."""
    size: Size = 28
    """Side of an image, in pixels; see `resize`."""
    num_levels: Annotated[int, Field(ge=2, le=INTENSITIES)] = 256
    """Intensities; neighboring ones are merged."""
    width: Annotated[
        int,
        Field(ge=4, multiple_of=4, description="a positive multiple of 4"),
        AtMost(16_384),
    ] = 256
    """Width of the embeddings."""
    units: Size = 256
    """Width of each pixel's memory."""
    iterations: Repeats = 5
    """Iterations of the SWARM layer."""

    def __post_init__(self) -> None:
        validate_no_part("encoder", self.encoder, "generation")
        validate_no_part("pooling", self.pooling, "generation")

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``pixels (B, L)`` uint8, row-major, and ``labels (B,)``."""
        batch = super().batch(split, rows)
        levels = batch["images"].int() * self.num_levels // INTENSITIES
        return {"pixels": levels.byte().flatten(1), "labels": batch["labels"]}

    @override
    def make_network(self, seed: int) -> nn.Module:
        return SwarmTransformer(
            self.shape,
            self.num_levels,
            num_classes=self.num_classes,
            width=self.width,
            units=self.units,
            iterations=self.iterations,
            seed=seed,
        )

    @override
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        pixels = batch["pixels"].long()
        logits = network(pixels, batch["labels"])
        losses = cross_entropy(logits.float().mT, pixels, reduction="none").mean(1)
        bits = losses.detach() / math.log(2)
        return LossAndMetrics(losses.mean(), {self.metric: bits})

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score independent pixels by their frequencies, and equal probabilities.

        Frequencies are of the training images, with Laplace smoothing (one more each).
        """
        pixels = batch["pixels"].long()
        frequencies = self.frequencies.to(pixels.device).gather(1, pixels.T).T
        even = torch.full_like(frequencies[:, 0], self.num_levels).log2()
        return {
            "pixels alone": -frequencies.log2().mean(1),
            "equal probabilities": even,
        }

    @cached_property
    def frequencies(self) -> Tensor:
        """Frequencies of the levels of each training pixel, ``(L, num_levels)``."""
        levels = self.num_levels
        # Number the (pixel, level) pairs, and count them chunk by chunk.
        first = levels * torch.arange(math.prod(self.shape))
        counts = torch.ones(levels * len(first), dtype=torch.int64)
        for rows in torch.arange(self.num_train).split(CHUNK):
            pixels = self.batch("train", rows)["pixels"]
            counts += (pixels + first).flatten().bincount(minlength=len(counts))
        totals = counts.view(-1, levels).double()
        return totals / totals.sum(1, keepdim=True)

    @override
    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        # Samples, a row for each class (Figure 6).
        assert isinstance(network, SwarmTransformer)
        rows = min(self.num_classes, 10)
        labels = torch.arange(rows).repeat_interleave(PER_CLASS)
        samples = network.sample(labels, generator)
        path = folder / "samples.png"
        _draw(samples.unflatten(0, (rows, PER_CLASS)), self.num_levels, path)
        return [path]


class SwarmTransformer(nn.Module):
    """Map the pixels of an image to logits of the next ones.

    ``x_i = E[pixel_{i-1}] + P(position_i) + K[channel_i] + C[class]`` passes through a
    causal SWARM layer. The inputs are shifted by one, so no logit depends on its own
    pixel or a later one; for the first pixel E is zero. Pixels are in row-major order,
    a pixel's channels one after the other.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.3.
    Positions are fixed sinusoids of row and column, as wide as the trainable embeddings
    and added to them; their frequencies are as in the published code (`sinusoids`).

    ``shape`` is height, width and channels of the images; the other options are as in
    `ImageGeneration`.
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
        self.register_buffer("places", sinusoids(shape, width), persistent=False)
        with seeded(seed, "embedding"):
            self.intensities = _embedding(num_levels, width)
            self.channels = _embedding(shape[2], width) if shape[2] > 1 else None
            self.classes = _embedding(num_classes, width)
        with seeded(seed, "layers"):
            self.layer = SwarmLayer(width, units, num_levels, iterations, "causal")
        self.units, self.iterations = units, iterations

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Compute the logits of every pixel, ``(B, L, num_levels)``.

        Those at i depend only on ``pixels[:, :i]``. Pixels ``(B, L)`` are int64 in
        [0, num_levels), in row-major order, and labels ``(B,)`` int64.
        """
        # Shift the pixels by one, so that no logit depends on its own pixel.
        previous = nn.functional.pad(self.intensities(pixels[:, :-1]), (0, 0, 1, 0))
        logits: Tensor = self.layer(previous + self.known(labels))
        return logits

    @torch.no_grad()
    def sample(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Sample images pixel by pixel, ``(B, H, W, C)`` int64 in [0, num_levels).

        All pixels have the same cost, because earlier ones are represented by running
        sums of hidden states (`SwarmLayer.step`). ``labels`` are ``(B,)`` int64; the
        generator is on the network's device.
        """
        embeddings, memory = self.known(labels), self.empty_memory(len(labels))
        pixels: list[Tensor] = []
        for place in range(embeddings.shape[1]):
            last = pixels[-1] if pixels else None
            shares = self.step(last, embeddings[:, place], memory, place).softmax(-1)
            pixels.append(torch.multinomial(shares, 1, generator=generator)[:, 0])
        return torch.stack(pixels, 1).unflatten(1, self.shape)

    def step(
        self, last: Tensor | None, embedding: Tensor, memory: Tensor, place: int
    ) -> Tensor:
        """Compute the logits ``(B, num_levels)`` of the pixel at index ``place``.

        ``last (B,)`` is the previous pixel, None at the first one; ``embedding``,
        ``(B, width)``, represents position, channel and class; ``memory``, from
        `empty_memory`, is updated in place.
        """
        x = embedding if last is None else embedding + self.intensities(last)
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
    spaced from 1 to ``max(H, W) / 2`` cycles per image.

    Source: the published code of SWARM; its text refers to the Image Transformer
    (https://arxiv.org/abs/1802.05751).

    ``shape`` is height, width and channels; the channels of a pixel share an encoding.
    ``width`` is a multiple of 4.
    """
    height, columns, channels = shape
    highest = math.log10(max(height, columns) / 2)
    cycles = torch.logspace(0, highest, width // 4, dtype=torch.float64)
    row_column = torch.cartesian_prod(torch.arange(height), torch.arange(columns))
    places = row_column.flip(-1) / columns
    angles = 2 * math.pi * cycles[:, None] * places[:, None].double()
    waves = torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
    return waves.to(torch.get_default_dtype()).repeat_interleave(channels, 0)


def _embedding(count: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(count, width)
    nn.init.uniform_(embedding.weight, -EMBEDDING, EMBEDDING)
    return embedding


@figure_style()
def _draw(images: Tensor, num_levels: int, path: Path) -> None:
    """Plot ``(rows, columns, H, W, C)`` images as a sheet with gray borders."""
    bright = images.float() / (num_levels - 1)
    framed = nn.functional.pad(bright, (0, 0, 1, 1, 1, 1), value=0.5)
    rows, columns, height = framed.shape[:3]
    # Join the images to one, whose single gray channel is repeated over the colors.
    sheet = framed.transpose(1, 2).flatten(2, 3).flatten(0, 1).expand(-1, -1, 3)
    figure = new_figure(0.6 * columns + 0.8, 0.6 * rows + 0.5)
    axes = figure.add_subplot()
    axes.imshow(sheet.numpy(), vmin=0, vmax=1)
    middles = [(row + 0.5) * height - 0.5 for row in range(rows)]
    axes.set_yticks(middles, [str(row) for row in range(rows)])
    axes.set_xticks([])
    axes.set_ylabel("class")
    axes.set_title("samples", fontsize=10)
    save_png(figure, path, dpi=100)
