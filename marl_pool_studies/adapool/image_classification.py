"""Image classification by a vision transformer with any pooling head."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from marl_pool.encoders.transformer import TransformerEncoder
from marl_pool.networks.set_network import SetNetwork, seeded
from marl_pool.options.types import (
    NamedOptions,
    PositiveFloat,
    Probability,
    Size,
    SizeOrZero,
    UnitInterval,
)
from marl_pool.pooling.ada import AdaPooling
from marl_pool.pooling.attention import ClsPooling
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.supervised.task import Batch, LossAndMetrics, validate_part
from marl_pool.utils.errors import InputError
from marl_pool_studies.image_task import ImageTask, error_of
from marl_pool_studies.images import (
    NORMALIZATION,
    Normalization,
    PatchEmbedding,
    check_patch,
    patches,
    random_crops,
    random_flips,
)


@dataclass(kw_only=True, eq=False)
class VisionOptions:
    """Options of a vision transformer; the defaults are the plainest network."""

    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    dropout: float = 0.0
    """Dropout probability of the encoder's feed-forward parts."""
    patch_norms: bool = False
    """Apply a LayerNorm before and after the projection of patches."""
    classifier_norm: bool = False
    """Apply a LayerNorm to the pooled vector."""
    embedding_dropout: Probability = 0.0
    """Dropout probability of embedded patches."""
    attention_dropout: Probability = 0.0
    """Dropout probability of attention weights and outputs, in encoder=transformer and
    pooling=ada; see `MultiHeadAttention`."""
    position_std: PositiveFloat | None = None
    """Standard deviation of the initial position embeddings, or None for
    ``fit.init_std``."""
    scale_residual_init: bool = False
    """Divide the initial weights of the last linear map of each residual branch of a
    transformer encoder with L layers, and the weights of the head ``ada``, by √(2 L),
    as GPT-2 does."""
    class_token_init: Literal["normal", "uniform"] = "normal"
    """Distribution of the initial class token, for pooling=cls only: N(0,
    ``init_std``) or uniform in [0, 1)."""


class VisionTransformer(nn.Module):
    """Vision transformer: patch embedding, set encoder, pooling head and classifier.

    A patch's position is its token type, whose learned embedding is added to the
    projected patch. So the network does not depend on the order of the tokens, only on
    their types.

    Source: the ViT of the AdaPool paper (https://arxiv.org/abs/2506.09215), section 4.5
    and C.7, and its published code; ViT is by Dosovitskiy et al.,
    https://arxiv.org/abs/2010.11929.

    ``encoder`` and ``pooling`` are ``{"name": …, **options}``. With ``normalization``
    None pixels stay in [0, 1].
    """

    def __init__(
        self,
        spec: TokenSpec,
        num_classes: int,
        *,
        encoder: NamedOptions,
        pooling: NamedOptions,
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
        # Replace initial weights according to the options.
        positions, head = self.pooled.embedding.types, self.pooled.pooling
        blocks = self.pooled.encoder
        if options.position_std is not None and positions is not None:
            with seeded(seed, "positions"):
                nn.init.normal_(positions.weight, std=options.position_std)
        if options.class_token_init == "uniform" and isinstance(head, ClsPooling):
            with seeded(seed, "class token"):
                nn.init.uniform_(head.tokens)
        if options.scale_residual_init and isinstance(blocks, TransformerEncoder):
            # Scale the last linear map of each residual branch, two in a layer.
            layers: Any = blocks.layers
            ends = [head.attention.to_out] if isinstance(head, AdaPooling) else []
            for layer in layers:
                ends += [layer.attention.to_out, layer.feedforward[2]]
            with torch.no_grad():
                for end in ends:
                    end.weight /= math.sqrt(2 * len(layers))

    def forward(self, cut: Tensor) -> Tensor:
        """Map patches ``(B, N, F)`` uint8, in row-major order, to logits ``(B, K)``."""
        places = torch.arange(cut.shape[1], device=cut.device).expand(cut.shape[:2])
        padding = torch.zeros_like(places, dtype=torch.bool)
        return self.scores(self.norm(self.pooled(Tokens(cut, places, padding))))


@dataclass(kw_only=True, eq=False)
class ImageClassification(VisionOptions, ImageTask):
    """Classify MNIST, Fashion-MNIST or CIFAR images by a `VisionTransformer`.

    The loss is the cross-entropy; validation minimises the fraction of wrong answers.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), section 4.5. Its text mentions
    no augmentation, and its Table 16 gives a feed-forward width of 64. The published
    code crops, flips and normalizes the images, and has norms, dropout, initial weights
    and a width of 2048 that are not in the text. All of them are options here, and
    ``scale=paper`` sets them.

    Raises:
        InputError: a patch size that does not divide the image, or a border wider than
            the image.
    """

    metric = "error"

    patch: Size = 4
    """Side of a patch, in pixels, a divisor of ``size``."""
    crop_padding: SizeOrZero = 0
    """Width of the border of zeros around a training image, in pixels, from which a
    window of the image's size is cut at random; 0: no crops."""
    flip_probability: UnitInterval = 0.0
    """Probability that a training image is mirrored, left to right."""
    normalize: bool = False
    """Subtract each channel's mean over the data set, and divide by its standard
    deviation; see `NORMALIZATION`."""

    def __post_init__(self) -> None:
        check_patch(self.size, self.patch)
        if self.crop_padding > self.size:
            raise InputError(
                f"task.crop_padding: expected at most task.size = {self.size}, "
                f"got {self.crop_padding}"
            )
        self.parts = {
            kind: validate_part(kind, getattr(self, kind), "images")
            for kind in ("encoder", "pooling")
        }
        self.normalization = NORMALIZATION[self.dataset] if self.normalize else None

    @override
    def make_network(self, seed: int) -> nn.Module:
        count = (self.size // self.patch) ** 2
        # A patch's position is its token type.
        spec = TokenSpec(
            count,
            self.patch**2 * self.shape[-1],
            tuple(f"place_{number}" for number in range(count)),
            has_self=False,
            dtype="uint8",
        )
        return VisionTransformer(
            spec,
            self.num_classes,
            encoder=self.parts["encoder"],
            pooling=self.parts["pooling"],
            options=self,
            normalization=self.normalization,
            seed=seed,
        )

    @override
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        images, labels = batch["images"], batch["labels"]
        # Images for validation and test are neither cropped nor flipped.
        if network.training and self.crop_padding:
            images = random_crops(images, self.crop_padding, generator)
        if network.training and self.flip_probability:
            images = random_flips(images, self.flip_probability, generator)
        scores = network(patches(images, self.patch)).float()
        losses = cross_entropy(scores, labels, reduction="none")
        metrics = {"cross_entropy": losses.detach(), "error": error_of(scores, labels)}
        return LossAndMetrics(losses.mean(), metrics)
