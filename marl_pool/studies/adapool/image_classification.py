"""Image classification by a vision transformer with any pooling head."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from marl_pool.encoders.transformer import TransformerEncoder, TransformerLayer
from marl_pool.networks import SetNetwork, seeded
from marl_pool.pooling.ada import AdaPooling
from marl_pool.pooling.cls_token import ClsPooling
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.supervised.images.augmentation import random_crops, random_flips
from marl_pool.training.supervised.images.images import (
    NORMALIZATION,
    Dataset,
    Normalization,
    check_patch,
    first_images,
    load_images,
    patches,
    resize,
)
from marl_pool.training.supervised.images.patch_embedding import PatchEmbedding
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Part,
    Split,
    Task,
    require_part,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    UnitInterval,
)

Place = Literal["corner", "focal", "mean"]
ClassTokenInit = Literal["normal", "uniform"]


@dataclass(frozen=True)
class VisionOptions:
    """Options of a vision transformer; the defaults are the plainest network.

    Attributes:
        init_std: standard deviation of the initial weights.
        dropout: dropout probability of the encoder's feed-forward parts.
        attention_dropout: dropout probability of attention, in encoder and head; see
            `MultiHeadAttention`.
        embedding_dropout: dropout probability of embedded patches.
        patch_norms: apply a LayerNorm before and after the projection of patches.
        classifier_norm: apply a LayerNorm to the pooled vector.
        position_std: standard deviation of the initial position embeddings; None:
            ``init_std``.
        scale_residual_init: divide the initial weights of the last linear map of each
            residual branch of a transformer encoder with L layers, and those of the
            head ``ada``, by √(2 L), as GPT-2 does.
        class_token_init: distribution of the initial class token, N(0, ``init_std``)
            or uniform in [0, 1).
    """

    init_std: float = 0.02
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    patch_norms: bool = False
    classifier_norm: bool = False
    position_std: float | None = None
    scale_residual_init: bool = False
    class_token_init: ClassTokenInit = "normal"


class VisionTransformer(nn.Module):
    """Vision transformer: patch embedding, set encoder, pooling head and classifier.

    A patch's position is its token type, whose learned embedding is added to the
    projected patch. So the network does not depend on the order of the tokens, only on
    their types.

    Source: the ViT of the AdaPool paper (https://arxiv.org/abs/2506.09215), section 4.5
    and C.7, and its published code; ViT is by Dosovitskiy et al.,
    https://arxiv.org/abs/2010.11929.

    Args:
        spec: specification of the patches as tokens.
        num_classes: number of classes, K.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``.
        options: options of the network.
        normalization: constants of the pixels' channels; None leaves pixels in [0, 1].
        seed: seed of the initial weights.
    """

    def __init__(
        self,
        spec: TokenSpec,
        num_classes: int,
        *,
        encoder: Part,
        pooling: Part,
        options: VisionOptions,
        normalization: Normalization | None = None,
        seed: int,
    ) -> None:
        super().__init__()
        self.pooled = SetNetwork(
            spec,
            encoder=encoder,
            pooling=pooling,
            type_embedding="add",
            embedding=partial(
                PatchEmbedding,
                normalization=normalization,
                norms=options.patch_norms,
                dropout=options.embedding_dropout,
            ),
            dropout=options.dropout,
            attention_dropout=options.attention_dropout,
            init_std=options.init_std,
            seed=seed,
        )
        dim = self.pooled.dim_out
        self.norm = nn.LayerNorm(dim) if options.classifier_norm else nn.Identity()
        with seeded(seed, "scores"):
            self.scores = nn.Linear(dim, num_classes)
            nn.init.normal_(self.scores.weight, std=options.init_std)
            nn.init.zeros_(self.scores.bias)
        self._initialize(options, seed)

    def _initialize(self, options: VisionOptions, seed: int) -> None:
        """Replace initial weights according to the options."""
        positions, head = self.pooled.embedding.types, self.pooled.pooling
        if options.position_std is not None and positions is not None:
            with seeded(seed, "positions"):
                nn.init.normal_(positions.weight, std=options.position_std)
        if options.class_token_init == "uniform" and isinstance(head, ClsPooling):
            with seeded(seed, "class token"):
                nn.init.uniform_(head.tokens)
        if options.scale_residual_init:
            _scale_branch_ends(self.pooled.encoder, head)

    def forward(self, cut: Tensor) -> Tensor:
        """Map patches ``(B, N, F)`` uint8, in row-major order, to logits ``(B, K)``."""
        places = torch.arange(cut.shape[1], device=cut.device).expand(cut.shape[:2])
        padding = torch.zeros_like(places, dtype=torch.bool)
        return self.scores(self.norm(self.pooled(Tokens(cut, places, padding))))


class ImageClassification(Task):
    """Classify MNIST, Fashion-MNIST or CIFAR images by a `VisionTransformer`.

    The loss is the cross-entropy; validation minimises the fraction of wrong answers.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), section 4.5. Its text mentions
    no augmentation, and its Table 16 gives a feed-forward width of 64. The published
    code crops, flips and normalizes the images, and has norms, dropout, initial weights
    and a width of 2048 that are not in the text. All of them are options here, and
    ``scale=paper`` sets them.

    Args:
        dataset: data set, whose files are in ``data_dir``.
        size: side of an image, in pixels; 28 are padded to 32, or averaged to 16 or 14.
        patch: side of a patch, in pixels, a divisor of ``size``.
        query: query of the head ``ada``: the patch in the upper left *corner*, the four
            in the middle (*focal*), or the *mean* of all. None: ``pooling.query``.
        num_samples: images for training and validation; None: all.
        num_test: images of the test set; None: all.
        crop_padding: width of the border of zeros around a training image, in pixels,
            from which a window of the image's size is cut at random; 0: no crops.
        flip_probability: probability that a training image is mirrored, left to right.
        normalize: subtract each channel's mean over the data set, and divide by its
            standard deviation; see `NORMALIZATION`.
        patch_norms: apply a LayerNorm before and after the projection of patches.
        classifier_norm: apply a LayerNorm to the pooled vector.
        embedding_dropout: dropout probability of embedded patches.
        attention_dropout: dropout probability of attention weights and outputs, in
            encoder=transformer and pooling=ada.
        position_std: standard deviation of the initial position embeddings; None:
            ``fit.init_std``.
        scale_residual_init: see `VisionOptions`.
        class_token_init: see `VisionOptions`; for pooling=cls only.
        encoder: set encoder.
        pooling: pooling head.
        dropout: dropout probability of the encoder.
        init_std: standard deviation of the initial weights.
        data_dir: folder of the files.
        download: download missing files.

    Raises:
        InputError: a patch size that does not divide the image, a border wider than the
            image, or a query that head or patches do not have.
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
        crop_padding: NonNegativeInt = 0,
        flip_probability: UnitInterval = 0.0,
        normalize: bool = False,
        patch_norms: bool = False,
        classifier_norm: bool = False,
        embedding_dropout: Probability = 0.0,
        attention_dropout: Probability = 0.0,
        position_std: PositiveFloat | None = None,
        scale_residual_init: bool = False,
        class_token_init: ClassTokenInit = "normal",
        encoder: Part | None,
        pooling: Part | None,
        dropout: float,
        init_std: float,
        data_dir: str | None,
        download: bool,
    ) -> None:
        check_patch(size, patch)
        if crop_padding > size:
            raise InputError(
                f"task.crop_padding: expected at most task.size = {size}, "
                f"got {crop_padding}"
            )
        self.dataset, self.size, self.patch = dataset, size, patch
        self.num_samples, self.wanted_test = num_samples, num_test
        self.encoder = require_part("encoder", encoder, "images")
        head = require_part("pooling", pooling, "images")
        side = size // patch
        self.pooling = head if query is None else _asked_at(head, query, side)
        self.crop_padding, self.flip_probability = crop_padding, flip_probability
        self.normalization = NORMALIZATION[dataset] if normalize else None
        self.options = VisionOptions(
            init_std=init_std,
            dropout=dropout,
            attention_dropout=attention_dropout,
            embedding_dropout=embedding_dropout,
            patch_norms=patch_norms,
            classifier_norm=classifier_norm,
            position_std=position_std,
            scale_residual_init=scale_residual_init,
            class_token_init=class_token_init,
        )
        self.data_dir, self.download = data_dir, download

    def prepare(self, folder: Path) -> None:
        """Read and resize the images."""
        whole = load_images(self.dataset, self.data_dir, self.download)
        images = first_images(whole, self.num_samples, self.wanted_test)
        self._images: dict[Split, Tensor] = {
            "train": resize(images.train, self.size),
            "test": resize(images.test, self.size),
        }
        self._labels: dict[Split, Tensor] = {
            "train": images.train_labels,
            "test": images.test_labels,
        }
        self.num_train, self.num_test = map(len, self._images.values())
        self.num_classes = images.num_classes

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``images (B, H, W, C)`` uint8 and ``labels (B,)``."""
        return {
            "images": self._images[split][rows],
            "labels": self._labels[split][rows],
        }

    def make_network(self, seed: int) -> nn.Module:
        """Build a `VisionTransformer`."""
        channels = self._images["train"].shape[-1]
        count, features = (self.size // self.patch) ** 2, self.patch**2 * channels
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
            options=self.options,
            normalization=self.normalization,
            seed=seed,
        )

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        """Return the cross-entropy and the error of each image.

        Training images are cropped and flipped at random, again in each epoch;
        validation and test images are not.
        """
        images, labels = batch["images"], batch["labels"]
        if network.training:
            images = self.augmented(images, generator)
        scores = network(patches(images, self.patch)).float()
        each = cross_entropy(scores, labels, reduction="none")
        wrong = (scores.argmax(-1) != labels).float()
        return LossAndMetrics(
            each.mean(), {"cross_entropy": each.detach(), "error": wrong}
        )

    def augmented(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Crop and flip images ``(B, H, W, C)`` at random, as configured."""
        if self.crop_padding:
            images = random_crops(images, self.crop_padding, generator)
        if self.flip_probability:
            images = random_flips(images, self.flip_probability, generator)
        return images


def _scale_branch_ends(encoder: nn.Module, head: nn.Module) -> None:
    """Scale initial weights; see `VisionOptions.scale_residual_init`."""
    if not isinstance(encoder, TransformerEncoder):
        return
    with torch.no_grad():
        for end in _branch_ends(encoder, head):
            end.weight /= math.sqrt(2 * len(encoder.layers))


def _branch_ends(encoder: TransformerEncoder, head: nn.Module) -> Iterator[nn.Linear]:
    for layer in encoder.layers:
        assert isinstance(layer, TransformerLayer)
        yield layer.attention.to_out
        end = layer.feedforward[2]
        assert isinstance(end, nn.Linear)
        yield end
    if isinstance(head, AdaPooling):
        yield head.attention.to_out


def _asked_at(head: Part, query: Place, side: int) -> Part:
    """Set the query of the head ``ada`` to positions in a square of patches."""
    if head["name"] != "ada":
        raise InputError(
            f"task.query: expected null with pooling={head['name']}, which has no "
            f"query of patches, got {query}"
        )
    if query == "mean":
        return {**head, "query": "mean"}
    if query == "corner":
        return {**head, "query": [0]}
    if side % 2:
        raise InputError(
            f"task.query: expected corner or mean, because {side} x {side} patches "
            "have no four in the middle, got focal"
        )
    low = side // 2 - 1
    rows = (low, low + 1)
    return {**head, "query": [row * side + column for row in rows for column in rows]}
