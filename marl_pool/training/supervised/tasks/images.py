"""Image classification by a vision transformer, with any pooling head."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from marl_pool.datasets.images import (
    Dataset,
    check_patch,
    limited,
    load_images,
    patches,
    resized,
)
from marl_pool.errors import InputError
from marl_pool.networks import SetNetwork, seeded
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.supervised.task import (
    Batch,
    Outcome,
    Part,
    Split,
    Task,
    require_part,
)
from marl_pool.types import PositiveInt

Place = Literal["corner", "focal", "mean"]


class VisionTransformer(nn.Module):
    """Patches and their places → a set encoder → a pooling head → a score per class.

    Source: the ViT of the AdaPool paper, section 4.5 and C.7. A patch's place is its
    token type, whose learned embedding is added to the projected patch; so the order
    of the tokens does not matter, their types do.

    Args:
        spec: of the tokens.
        num_classes: scores.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``.
        dropout: of the encoder.
        init_std: of the initial weights.
        seed: of the initial weights.
    """

    def __init__(
        self,
        spec: TokenSpec,
        num_classes: int,
        *,
        encoder: Part,
        pooling: Part,
        dropout: float,
        init_std: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.pooled = SetNetwork(
            spec,
            encoder=encoder,
            pooling=pooling,
            type_embedding="add",
            dropout=dropout,
            init_std=init_std,
            seed=seed,
        )
        with seeded(seed, "scores"):
            self.scores = nn.Linear(self.pooled.dim_out, num_classes)
            nn.init.normal_(self.scores.weight, std=init_std)
            nn.init.zeros_(self.scores.bias)

    def forward(self, cut: Tensor) -> Tensor:
        """Score patches ``(B, N, F)`` uint8, in the order of reading, as ``(B, K)``."""
        places = torch.arange(cut.shape[1], device=cut.device).expand(cut.shape[:2])
        padding = torch.zeros_like(places, dtype=torch.bool)
        return self.scores(self.pooled(Tokens(cut, places, padding)))


class ImageClassification(Task):
    """Which class an image is of: AdaPool, section 4.5, on MNIST, Fashion or CIFAR.

    Where we differ: no augmentation is mentioned there and there is none here; the
    paper's dropout of attention weights is left out.

    Args:
        dataset: which images; their files are in ``data_dir``.
        size: pixels of a side; 28 are padded to 32, or averaged to 16 or 14.
        patch: pixels of a patch's side, a divisor of ``size``.
        query: of the head ``ada``: the patch in the upper left *corner*, the four in
            the middle (*focal*), or the *mean* of all. None: as ``pooling.query`` says.
        num_samples: images to train on and to validate with; None: all.
        num_test: images of the test set; None: all.
        encoder: the set encoder.
        pooling: the head.
        dropout: of the encoder.
        init_std: of the initial weights.
        data_dir: folder of the files.
        download: fetch what is missing.

    Raises:
        InputError: a patch that does not divide the image, a query that the head or the
            patches don't have.
    """

    metric = "error"

    def __init__(
        self,
        *,
        dataset: Dataset = "fashion_mnist",
        size: PositiveInt = 32,
        patch: PositiveInt = 4,
        query: Place | None = None,
        num_samples: PositiveInt | None = None,
        num_test: PositiveInt | None = None,
        encoder: Part | None,
        pooling: Part | None,
        dropout: float,
        init_std: float,
        data_dir: str | None,
        download: bool,
    ) -> None:
        check_patch(size, patch)
        self.dataset, self.size, self.patch = dataset, size, patch
        self.num_samples, self.wanted_test = num_samples, num_test
        self.encoder = require_part("encoder", encoder, "images")
        head = require_part("pooling", pooling, "images")
        side = size // patch
        self.pooling = head if query is None else _asked_at(head, query, side)
        self.dropout, self.init_std = dropout, init_std
        self.data_dir, self.download = data_dir, download

    def prepare(self, folder: Path) -> None:
        """Read the files."""
        whole = load_images(self.dataset, self.data_dir, self.download)
        images = limited(whole, self.num_samples, self.wanted_test)
        self._tokens: dict[Split, Tensor] = {
            "train": self._cut(images.train),
            "test": self._cut(images.test),
        }
        self._labels: dict[Split, Tensor] = {
            "train": images.train_labels,
            "test": images.test_labels,
        }
        self.num_train, self.num_test = map(len, self._tokens.values())
        self.num_classes = images.num_classes

    def _cut(self, images: Tensor) -> Tensor:
        return patches(resized(images, self.size), self.patch).contiguous()

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Patches ``(B, N, F)`` uint8 and labels ``(B,)``."""
        return {
            "patches": self._tokens[split][rows],
            "labels": self._labels[split][rows],
        }

    def make_network(self, seed: int) -> nn.Module:
        """Build a `VisionTransformer`."""
        count, features = self._tokens["train"].shape[1:]
        spec = TokenSpec(
            count,
            features,
            tuple(f"place_{number}" for number in range(count)),
            has_self=False,
            dtype="uint8",
        )
        return VisionTransformer(
            spec,
            self.num_classes,
            encoder=self.encoder,
            pooling=self.pooling,
            dropout=self.dropout,
            init_std=self.init_std,
            seed=seed,
        )

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> Outcome:
        """Cross-entropy; the share of wrong answers is what validation minimises."""
        scores, labels = network(batch["patches"]).float(), batch["labels"]
        each = cross_entropy(scores, labels, reduction="none")
        wrong = (scores.argmax(-1) != labels).float()
        return Outcome(each.mean(), {"cross_entropy": each.detach(), "error": wrong})


def _asked_at(head: Part, query: Place, side: int) -> Part:
    """The head ``ada`` with its query at a place of a square of patches."""
    if head["name"] != "ada":
        raise InputError(
            f"task.query: expected null with pooling={head['name']}, which has no "
            f"query, got {query}"
        )
    if query == "mean":
        return {**head, "query": "mean"}
    if query == "corner":
        return {**head, "query": [0]}
    if side % 2:
        raise InputError(
            f"task.query: expected corner or mean, for a square of {side} x {side} "
            "patches has no four in the middle, got focal"
        )
    low = side // 2 - 1
    rows = (low, low + 1)
    return {**head, "query": [row * side + column for row in rows for column in rows]}
