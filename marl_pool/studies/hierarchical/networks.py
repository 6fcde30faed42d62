"""Image autoencoder, and the classifier that is its encoder alone."""

from collections.abc import Sequence

from torch import Tensor, nn

from marl_pool.networks import seeded
from marl_pool.studies.hierarchical.decoder import HierarchicalDecoder
from marl_pool.studies.hierarchical.encoder import (
    Chance,
    HierarchicalEncoder,
    NetworkOutput,
)
from marl_pool.studies.hierarchical.images import (
    ImageLayout,
    Patches,
    PixelQueries,
)
from marl_pool.studies.hierarchical.settings import Hierarchy


class MergingNetwork(nn.Module):
    """Base of the networks on images: patches, and the encoder that merges them."""

    def __init__(self, layout: ImageLayout, settings: Hierarchy) -> None:
        super().__init__()
        self.patches = Patches(layout, settings.dim)
        self.encoder = HierarchicalEncoder(settings)

    def initialize(self, last: nn.Linear, seed: int) -> None:
        """Sample Glorot-uniform weights; set biases and the layer ``last`` to zero.

        The weights of a layer depend only on the seed and the layer's name, so variants
        share the weights of all layers that they have in common.

        The paper does not specify initial weights. With an output of zero the initial
        loss is small, and so is the variance of the REINFORCE gradient, which it
        scales.
        """
        # Seed each layer by its name.
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear):
                with seeded(seed, name):
                    nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        nn.init.zeros_(last.weight)


class ImageAutoencoder(MergingNetwork):
    """Images to patches, merged and unmerged, to images.

    Source: Nair and Lieck, Figure 1.
    """

    def __init__(self, layout: ImageLayout, settings: Hierarchy, seed: int) -> None:
        super().__init__(layout, settings)
        self.decoder = HierarchicalDecoder(settings)
        self.pixels = PixelQueries(layout, settings.dim, settings.num_heads)
        self.initialize(self.pixels.last, seed)

    def forward(
        self, images: Tensor, schedule: Sequence[int], chance: Chance
    ) -> NetworkOutput:
        """Reconstruct ``images (B, H, W, C)`` after the merges of ``schedule``."""
        encoded = self.encoder(self.patches(images), schedule, chance)
        decoded = self.decoder(encoded.output, schedule, chance)
        return NetworkOutput(
            self.pixels(decoded.output),
            encoded.log_prob + decoded.log_prob,
            encoded.norm + decoded.norm,
        )


class MergedClassifier(MergingNetwork):
    """Map images to patches, merge them, and classify the mean of the tokens left.

    The mean is layer-normalised first, as usual after pre-norm blocks.

    Source: Nair and Lieck, section 4.1.
    """

    def __init__(
        self, layout: ImageLayout, settings: Hierarchy, seed: int, num_classes: int
    ) -> None:
        super().__init__(layout, settings)
        self.last_norm = nn.LayerNorm(settings.dim)
        self.last = nn.Linear(settings.dim, num_classes)
        self.initialize(self.last, seed)

    def forward(
        self, images: Tensor, schedule: Sequence[int], chance: Chance
    ) -> NetworkOutput:
        """Classify ``images (B, H, W, C)`` after the merges of ``schedule``."""
        encoded = self.encoder(self.patches(images), schedule, chance)
        logits = self.last(self.last_norm(encoded.output.mean(1)))
        return encoded._replace(output=logits)
