"""Networks on images: the autoencoder, its pre-training, and the classifier."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.encoders.merging import Refinement, merging_mlp
from marl_pool.encoders.pairs import gather_tokens
from marl_pool.networks.set_network import seeded
from marl_pool_studies.hierarchical.layers import (
    Chance,
    HierarchicalDecoder,
    HierarchicalEncoder,
    Hierarchy,
    NetworkOutput,
)
from marl_pool_studies.images import patches


class ImageLayout(NamedTuple):
    """Layout of images as patches."""

    shape: tuple[int, int, int]
    """Height, width and channels of the images."""
    patch: int
    """Side of a patch, a divisor of height and width."""
    bands: int
    """Frequencies of the Fourier positions."""


def fourier_positions(height: int, width: int, bands: int) -> Tensor:
    """Compute features of each pixel's position, ``(height, width, 4 bands + 2)``.

    They are the sines and cosines of ``2π y f`` and ``2π x f``, and the coordinates x
    and y in [-1, 1]. The frequencies f are evenly spaced from ``1 / max(h, w)`` to
    ``min(h, w) / 2``.

    Source: Nair and Lieck, A.2.
    """
    rows, columns = (torch.linspace(-1, 1, size) for size in (height, width))
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    low, high = 1 / max(height, width), min(height, width) / 2
    frequencies = torch.linspace(low, high, bands)
    angles = [2 * math.pi * axis[..., None] * frequencies for axis in (y, x)]
    waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
    return torch.cat([*waves, x[..., None], y[..., None]], -1)


class Patches(nn.Module):
    """Cut an image into patches, and project each with its pixels' positions.

    Source: Nair and Lieck, section 3.1.1. Difference: a pixel v enters as
    ``4 (v - 1/2)``. Otherwise the few pixel values have little effect among the many
    position features, and the network learns only the mean image for a long time.
    """

    def __init__(self, layout: ImageLayout, dim: int) -> None:
        super().__init__()
        height, width, channels = layout.shape
        self.patch = layout.patch
        self.positions: Tensor
        positions = fourier_positions(height, width, layout.bands)
        self.register_buffer("positions", positions, persistent=False)
        per_pixel = channels + positions.shape[-1]
        self.project = nn.Linear(per_pixel * self.patch**2, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``(B, H, W, C)``, in [0, 1], as ``(B, N, D)``, patches row by row."""
        places = self.positions.to(images.dtype).expand(len(images), -1, -1, -1)
        inputs = torch.cat([4 * (images - 0.5), places], -1)
        return self.project(patches(inputs, self.patch))


class PixelQueries(nn.Module):
    """Read pixels out of a set of tokens, by attention from their Fourier positions.

    ``h = q + Attention(LN(q), LN(x))``, then ``W LN(h + MLP(LN(h)))``. The result does
    not depend on the order of the tokens.

    Source: Nair and Lieck, section 3.1.1, after Perceiver IO
    (https://arxiv.org/abs/2107.14795), whose decoder has the residual of the queries
    and the MLP, too.
    """

    def __init__(self, layout: ImageLayout, dim: int, num_heads: int) -> None:
        super().__init__()
        height, width, channels = layout.shape
        self.size = (height, width)
        self.positions: Tensor
        positions = fourier_positions(height, width, layout.bands).flatten(0, 1)
        self.register_buffer("positions", positions, persistent=False)
        self.to_query = nn.Linear(positions.shape[-1], dim)
        self.answer = Refinement(dim, num_heads)
        mlp = merging_mlp(dim, dim, 2 * dim)
        self.feedforward = nn.Sequential(nn.LayerNorm(dim), mlp)
        self.last_norm, self.last = nn.LayerNorm(dim), nn.Linear(dim, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Read ``(B, H, W, C)`` out of ``(B, N, D)``."""
        queries = self.to_query(self.positions.to(x.dtype)).expand(len(x), -1, -1)
        answers = self.answer(queries, x)
        answers = answers + self.feedforward(answers)
        return self.last(self.last_norm(answers)).unflatten(1, self.size)


class MergingNetwork(nn.Module):
    """Base of the networks on images: patches, and the encoder that merges them."""

    def __init__(self, layout: ImageLayout, settings: Hierarchy) -> None:
        super().__init__()
        self.patches = Patches(layout, settings.dim)
        self.encoder = HierarchicalEncoder(settings)

    @torch.no_grad()
    def first_policy(self, images: Tensor, chance: Chance) -> Tensor:
        """Compute the first merge's probabilities of ordered pairs, ``(B, T, T)``."""
        # Apply the first layer up to its choice of pairs.
        x, _ = self.encoder.entrance(self.patches(images), 1, chance.generator)
        _, logits = self.encoder.layer.transform(x)
        diagonal = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        logits = logits.masked_fill(diagonal, -torch.inf)
        return logits.flatten(1).softmax(1).view_as(logits)

    def initialize(self, last: nn.Linear, seed: int) -> None:
        """Sample Glorot-uniform weights; set biases and the layer ``last`` to zero.

        The weights of a layer depend only on the seed and the layer's name, so variants
        share the weights of all layers that they have in common.

        The paper does not specify initial weights. With an output of zero the initial
        loss is small, and so is the variance of the REINFORCE gradient, which it
        scales.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                with seeded(seed, name):
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
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
    """Map images to patches, merge them, and classify the mean of the remaining tokens.

    The mean is layer-normalized first, as usual after pre-norm blocks.

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


class Forced(NamedTuple):
    """Losses of teacher forcing."""

    losses: Tensor
    """``(B,)``, squared error of tokens, the mean over layers, plus the error of the
    pixels read from unmerged tokens."""
    score: Tensor
    """``(B,)``, sum over layers of log-probability times the layer's error, for
    REINFORCE on the merging policy."""
    unmerging: Tensor
    """``(B,)``, cross-entropy of the tokens to unmerge, summed over layers."""
    norm: Tensor
    """``(B,)``, squared norm of the tokens, summed over layers."""


def teacher_forced(
    network: ImageAutoencoder, images: Tensor, schedule: Sequence[int], chance: Chance
) -> Forced:
    """Merge layer by layer, and let the decoder undo each layer immediately.

    The decoder receives the tokens to unmerge, and learns to choose them.

    Source: Nair and Lieck, section 3.2.2. Differences: neither an error's target nor
    the tokens passed to the next layer have a gradient, otherwise equal tokens would
    minimise the error; and pixels are read from the unmerged tokens, so that the layers
    between images and tokens are trained as well.
    """
    # Read the pixels from the unmerged tokens.
    x = network.patches(images)
    losses = (network.pixels(x) - images).square().mean((1, 2, 3))
    score = unmerging = norm = torch.zeros_like(losses)
    for depth, count in enumerate(schedule, 1):
        # Merge, and unmerge the tokens that were merged, which are last.
        step = network.encoder.step(x, depth, count, chance)
        size = step.tokens.shape[1]
        last = torch.arange(size - count, size, device=x.device).expand(len(x), -1)
        unmerged = network.decoder.step(step.tokens, depth, count, chance, last)
        # Compare with the input tokens, in the decoder's order.
        assert step.pairs is not None
        order = torch.cat([step.unchanged, step.pairs.gone, step.pairs.kept], 1)
        target = gather_tokens(x, order).detach()
        error = (unmerged.tokens - target).square().mean((1, 2))
        # The layer's own error is the loss of its choices.
        losses = losses + error / len(schedule)
        score = score + error.detach() * step.log_prob
        unmerging = unmerging - unmerged.log_prob
        norm = norm + step.norm + unmerged.norm
        # Layers are trained one by one, without a gradient between them.
        x = step.tokens.detach()
    return Forced(losses, score, unmerging, norm)
