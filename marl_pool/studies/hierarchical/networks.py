"""Image autoencoder, and the classifier that is its encoder alone."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from marl_pool.networks import seeded
from marl_pool.studies.hierarchical.decoder import HierarchicalDecoder
from marl_pool.studies.hierarchical.encoder import Chance, HierarchicalEncoder
from marl_pool.studies.hierarchical.images import Patches, PixelQueries
from marl_pool.studies.hierarchical.settings import Hierarchy


class NetworkOutput(NamedTuple):
    """Output of a network on images.

    Attributes:
        output: images ``(B, H, W, C)``, or logits ``(B, classes)``.
        log_prob: ``(B,)``, log-probability of all choices.
        norm: ``(B,)``, squared norm of the tokens, summed over layers.
    """

    output: Tensor
    log_prob: Tensor
    norm: Tensor


def initialize(network: nn.Module, last: nn.Linear, seed: int | None) -> None:
    """Sample Glorot-uniform weights; set biases and the layer ``last`` to zero.

    The weights of a layer depend only on the seed and the layer's name, so variants
    share the weights of all layers that they have in common.

    The paper does not specify initial weights. With an output of zero the initial loss
    is small, and so is the variance of the REINFORCE gradient, which it scales.
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
        bands: frequencies of the Fourier positions.
        settings: settings of encoder and decoder.
        seed: seed of the initial weights; None: torch's global generator.

    Raises:
        InputError: incompatible sizes.
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
    ) -> NetworkOutput:
        """Reconstruct ``images (B, H, W, C)`` after the merges of ``schedule``."""
        encoded = self.encoder(self.patches(images), schedule, chance)
        decoded = self.decoder(encoded.tokens, schedule, chance)
        return NetworkOutput(
            self.pixels(decoded.tokens),
            encoded.log_prob + decoded.log_prob,
            encoded.norm + decoded.norm,
        )


class MergedClassifier(nn.Module):
    """Map images to patches, merge them, and classify the mean of the tokens left.

    The mean is layer-normalised first, as usual after pre-norm blocks.

    Source: Nair and Lieck, section 4.1.

    Args:
        shape: height, width and channels of the images.
        patch: side of a patch.
        bands: frequencies of the Fourier positions.
        num_classes: number of classes.
        settings: settings of the encoder.
        seed: seed of the initial weights; None: torch's global generator.

    Raises:
        InputError: incompatible sizes.
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
    ) -> NetworkOutput:
        """Classify ``images (B, H, W, C)`` after the merges of ``schedule``."""
        encoded = self.encoder(self.patches(images), schedule, chance)
        logits = self.last(self.last_norm(encoded.tokens.mean(1)))
        return NetworkOutput(logits, encoded.log_prob, encoded.norm)
