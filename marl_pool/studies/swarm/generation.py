"""Autoregressive image generation by a SWARM transformer."""

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from marl_pool.studies.swarm.transformer import (
    SwarmTransformer,
    check_width,
)
from marl_pool.training.supervised.images.images import (
    Dataset,
    first_images,
    load_images,
    resize,
)
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Part,
    Split,
    Task,
    validate_no_part,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.plotting import figure_style, new_figure, save_png
from marl_pool.utils.types import PositiveInt

INTENSITIES = 256
CHUNK = 1000
"""Images to count together."""
PER_CLASS = 8
"""Samples of each class in the picture."""


class ImageGeneration(Task):
    r"""Predict each pixel of an image from the earlier ones and the image's class.

    The loss is the negative log-likelihood; the metric is bits per dimension,

    .. math:: -\frac{1}{L} \sum_{i=1}^{L} \log_2 p(x_i \mid x_{<i}, c),

    over the L pixels and channels of an image of class c. It depends on ``num_levels``
    and ``size``: only the published sizes compare with published numbers.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.3; see
    `SwarmTransformer`.

    Args:
        encoder: must be ``none``, because the task has its own network.
        pooling: must be ``none``.
        dataset: data set, whose files are in ``data_dir``.
        size: side of an image, in pixels; see `resize`.
        num_levels: intensities, 2 to 256; neighbouring ones are merged.
        conditional: condition on the image's class.
        width: width of the embeddings, a multiple of 4.
        units: width of each pixel's memory.
        iterations: iterations of each SWARM layer.
        num_layers: number of SWARM layers; the paper has one.
        num_samples: images for training and validation; None: all.
        num_test: images of the test set; None: all.
        data_dir: folder of the files.
        download: download missing files.

    Raises:
        InputError: an encoder or a pooling head, or a number out of range.
    """

    metric = "bits_per_dim"

    def __init__(
        self,
        *,
        encoder: Part | None = None,
        pooling: Part | None = None,
        dataset: Dataset = "mnist",
        size: PositiveInt = 28,
        num_levels: PositiveInt = 256,
        conditional: bool = True,
        width: PositiveInt = 256,
        units: PositiveInt = 256,
        iterations: PositiveInt = 5,
        num_layers: PositiveInt = 1,
        num_samples: PositiveInt | None = None,
        num_test: PositiveInt | None = None,
        data_dir: str | None = None,
        download: bool = False,
    ) -> None:
        validate_no_part("encoder", encoder, "generation")
        validate_no_part("pooling", pooling, "generation")
        if not 2 <= num_levels <= INTENSITIES:
            raise InputError(
                f"task.num_levels: expected 2 to {INTENSITIES}, got {num_levels}"
            )
        check_width(width)
        self.dataset, self.size, self.num_levels = dataset, size, num_levels
        self.conditional, self.width, self.units = conditional, width, units
        self.iterations, self.num_layers = iterations, num_layers
        self.num_samples, self.wanted_test = num_samples, num_test
        self.data_dir, self.download = data_dir, download

    def prepare(self, folder: Path) -> None:
        """Read, resize and quantize the images."""
        images = first_images(
            load_images(self.dataset, self.data_dir, self.download),
            self.num_samples,
            self.wanted_test,
        )
        train, test = (resize(each, self.size) for each in (images.train, images.test))
        self.shape = (self.size, self.size, train.shape[-1])
        self.num_classes = images.num_classes
        self.pixels = {"train": self._read(train), "test": self._read(test)}
        self.labels = {"train": images.train_labels, "test": images.test_labels}
        self.num_train, self.num_test = len(train), len(test)

    def _read(self, images: Tensor) -> Tensor:
        """Quantize pixels to uint8 in [0, num_levels), row-major ``(n, L)``."""
        levels = images.to(torch.int16) * self.num_levels // INTENSITIES
        return levels.to(torch.uint8).flatten(1)

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``pixels (B, L)`` uint8 and ``labels (B,)``."""
        return {"pixels": self.pixels[split][rows], "labels": self.labels[split][rows]}

    def make_network(self, seed: int) -> nn.Module:
        """Build a `SwarmTransformer`."""
        return SwarmTransformer(
            self.shape,
            self.num_levels,
            num_classes=self.num_classes if self.conditional else 0,
            width=self.width,
            units=self.units,
            iterations=self.iterations,
            num_layers=self.num_layers,
            seed=seed,
        )

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        """Return the negative log-likelihood in nats, and bits per dimension."""
        pixels = batch["pixels"].long()
        logits = network(pixels, batch["labels"] if self.conditional else None)
        each = cross_entropy(logits.float().mT, pixels, reduction="none").mean(1)
        return LossAndMetrics(
            each.mean(), {"bits_per_dim": each.detach() / math.log(2)}
        )

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score independent pixels by their frequencies, and equal probabilities.

        Frequencies are of the training images, with Laplace smoothing (one more each).
        """
        pixels = batch["pixels"].long()
        found = self.frequencies.to(pixels.device).gather(1, pixels.T).T
        even = torch.full_like(found[:, 0], self.num_levels).log2()
        return {"pixels alone": -found.log2().mean(1), "equal probabilities": even}

    @cached_property
    def frequencies(self) -> Tensor:
        """Frequencies of the levels of each training pixel, ``(L, num_levels)``."""
        pixels, levels = self.pixels["train"], self.num_levels
        first = levels * torch.arange(pixels.shape[1])
        counts = torch.ones(levels * len(first), dtype=torch.int64)
        for some in pixels.split(CHUNK):
            counts += (some + first).flatten().bincount(minlength=len(counts))
        found = counts.view(-1, levels).double()
        return found / found.sum(1, keepdim=True)

    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        """Plot samples, a row for each class (Figure 6)."""
        assert isinstance(network, SwarmTransformer)
        rows = min(self.num_classes, 10)
        labels = torch.arange(rows).repeat_interleave(PER_CLASS)
        given = labels if self.conditional else None
        drawn = network.sample(len(labels), given, generator)
        path = folder / "samples.png"
        _draw(drawn.unflatten(0, (rows, PER_CLASS)), self.num_levels, path)
        return [path]


@figure_style()
def _draw(images: Tensor, num_levels: int, path: Path) -> None:
    """Plot ``(rows, columns, H, W, C)`` images as a sheet with gray borders."""
    bright = images.float() / (num_levels - 1)
    framed = nn.functional.pad(bright, (0, 0, 1, 1, 1, 1), value=0.5)
    rows, columns, height, width, channels = framed.shape
    sheet = framed.permute(0, 2, 1, 3, 4).reshape(
        rows * height, columns * width, channels
    )
    colored = sheet if channels == 3 else sheet.expand(-1, -1, 3)
    figure = new_figure(0.6 * columns + 0.8, 0.6 * rows + 0.5)
    axes = figure.add_subplot()
    axes.imshow(colored.numpy(), vmin=0, vmax=1)
    middles = [(row + 0.5) * height - 0.5 for row in range(rows)]
    axes.set_yticks(middles, [str(row) for row in range(rows)])
    axes.set_xticks([])
    axes.set_ylabel("class")
    axes.set_title("samples", fontsize=10)
    save_png(figure, path, dpi=100)
