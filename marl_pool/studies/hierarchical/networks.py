"""The image autoencoder, and the classifier that is its encoder alone."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from marl_pool.networks import seeded
from marl_pool.studies.hierarchical.decoder import HierarchicalDecoder
from marl_pool.studies.hierarchical.encoder import Chance, HierarchicalEncoder
from marl_pool.studies.hierarchical.images import Patches, PixelQueries
from marl_pool.studies.hierarchical.settings import Hierarchy


class Answer(NamedTuple):
    """Output of a network for images.

    Attributes:
        output: images ``(B, H, W, C)``, or logits ``(B, classes)``.
        log_prob: ``(B,)`` of its choices.
        norm: ``(B,)`` squared norm of the tokens, summed over layers.
    """

    output: Tensor
    log_prob: Tensor
    norm: Tensor


def initialize(network: nn.Module, last: nn.Linear, seed: int | None) -> None:
    """Draw Glorot's weights, with biases of zero and nothing but zeros in ``last``.

    Each layer's follow from the seed and its name alone, so that variants share the
    weights of all that they have in common.

    The paper says nothing of initial weights. A network that begins by answering zero
    begins with a small loss; and a loss weighs the noisy gradient of all choices.
    """
    for name, part in network.named_modules():
        if isinstance(part, nn.Linear):
            with seeded(seed, name):
                nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    nn.init.zeros_(last.weight)


class ImageAutoencoder(nn.Module):
    """Images to patches, merged and unmerged, to images.

    Source: Nair and Lieck, Figure 1.

    Args:
        shape: height, width and channels of the images.
        patch: side of a patch.
        bands: of the Fourier positions.
        settings: of encoder and decoder.
        seed: of the initial weights; None draws from torch's global generator.

    Raises:
        InputError: sizes that do not fit.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        patch: int,
        bands: int,
        settings: Hierarchy,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.patches = Patches(shape, patch, bands, settings.dim)
        self.encoder = HierarchicalEncoder(settings)
        self.decoder = HierarchicalDecoder(settings)
        self.pixels = PixelQueries(shape, bands, settings.dim, settings.num_heads)
        initialize(self, self.pixels.last, seed)

    def forward(
        self, images: Tensor, schedule: Sequence[int], chance: Chance
    ) -> Answer:
        """Reconstruct ``images (B, H, W, C)`` after the merges of ``schedule``."""
        encoded = self.encoder(self.patches(images), schedule, chance)
        decoded = self.decoder(encoded.tokens, schedule, chance)
        return Answer(
            self.pixels(decoded.tokens),
            encoded.log_prob + decoded.log_prob,
            encoded.norm + decoded.norm,
        )


class MergedClassifier(nn.Module):
    """The encoder alone: images to patches, merged, to the logits of classes.

    Source: Nair and Lieck, section 4.1. Where more than one token is left, their mean
    is classified; it is layer-normalised first, as usual after pre-norm blocks.

    Args:
        shape: height, width and channels of the images.
        patch: side of a patch.
        bands: of the Fourier positions.
        num_classes: of the images.
        settings: of the encoder.
        seed: of the initial weights; None draws from torch's global generator.

    Raises:
        InputError: sizes that do not fit.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        patch: int,
        bands: int,
        num_classes: int,
        settings: Hierarchy,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.patches = Patches(shape, patch, bands, settings.dim)
        self.encoder = HierarchicalEncoder(settings)
        self.last_norm = nn.LayerNorm(settings.dim)
        self.last = nn.Linear(settings.dim, num_classes)
        initialize(self, self.last, seed)

    def forward(
        self, images: Tensor, schedule: Sequence[int], chance: Chance
    ) -> Answer:
        """Classify ``images (B, H, W, C)`` after the merges of ``schedule``."""
        encoded = self.encoder(self.patches(images), schedule, chance)
        logits = self.last(self.last_norm(encoded.tokens.mean(1)))
        return Answer(logits, encoded.log_prob, encoded.norm)
