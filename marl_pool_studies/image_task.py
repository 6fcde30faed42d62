"""Base of the tasks on labelled images."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import Examples, NamedOptions, Size
from marl_pool.training.supervised.task import Batch, Split, Task
from marl_pool.utils.errors import InputError
from marl_pool_studies.images import Dataset, load_images, resize


@dataclass(kw_only=True, eq=False)
class ImageTask(Task):
    """Base of the tasks on labelled images.

    Attributes:
        images: ``(n, H, W, C)`` uint8 by split, known after `prepare`.
        labels: ``(n,)`` int64 by split, known after `prepare`.
        shape: height, width and channels of an image, known after `prepare`.
        num_classes: number of classes, known after `prepare`.
    """

    encoder: NamedOptions | None = None
    """Set encoder."""
    pooling: NamedOptions | None = None
    """Pooling head."""
    dataset: Dataset = "fashion_mnist"
    """Data set, whose files are in ``data_dir``."""
    size: Size = 32
    """Side of an image, in pixels; 28 are padded to 32, or averaged to 16 or 14."""
    num_samples: Examples | None = None
    """Images for training and validation, or None for all."""
    num_test: Examples | None = None  # type: ignore[assignment] # until `prepare`
    """Images of the test set, or None for all."""
    data_dir: str | None = None
    """Folder of the files."""
    download: bool = False
    """Download missing files."""

    @override
    def prepare(self, folder: Path) -> None:
        images = load_images(self.dataset, self.data_dir, self.download)
        self.images: dict[Split, Tensor] = {}
        self.labels: dict[Split, Tensor] = {}
        parts: tuple[tuple[Split, str, Tensor, Tensor], ...] = (
            ("train", "num_samples", images.train, images.train_labels),
            ("test", "num_test", images.test, images.test_labels),
        )
        for split, name, pixels, labels in parts:
            count = getattr(self, name)
            if count is not None and count > len(pixels):
                raise InputError(
                    f"task.{name}: expected at most {len(pixels)}, the images of the "
                    f"data set, got {count}"
                )
            self.images[split] = resize(pixels[:count], self.size)
            self.labels[split] = labels[:count]
        self.num_train, self.num_test = map(len, self.images.values())
        self.num_classes = images.num_classes
        self.shape = (self.size, self.size, images.train.shape[-1])

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``images (B, H, W, C)`` uint8 and ``labels (B,)``."""
        return {"images": self.images[split][rows], "labels": self.labels[split][rows]}


def error_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 for each wrong answer of a classifier, ``(B,)``."""
    return (logits.argmax(-1) != labels).float()
