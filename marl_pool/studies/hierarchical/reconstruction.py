"""Image reconstruction by the hierarchical autoencoder."""

from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.studies.hierarchical.encoder import Chance
from marl_pool.studies.hierarchical.networks import ImageAutoencoder
from marl_pool.studies.hierarchical.pretraining import teacher_forced
from marl_pool.studies.hierarchical.task import MergedImages, near, scaled
from marl_pool.training.supervised.task import Batch, LossAndMetrics

SHOWN = 8
"""Test images in the plot of reconstructions."""


class Reconstruction(MergedImages):
    """Reconstruct images after merging their patches: Nair and Lieck, section 4.2.

    The loss is the squared error, the mean over pixels and channels in [0, 1];
    ``mse_27`` is that of reconstructions from 27 tokens, ``mse`` the mean over
    ``levels``. ``policy_information`` is the mutual information of image and first
    merge within a batch, in nats; see `divergences`.
    """

    name, metric = "reconstruction", "mse"
    has_decoder = True

    @override
    def make_network(self, seed: int) -> ImageAutoencoder:
        return ImageAutoencoder(self.layout, self.hierarchy, seed)

    @override
    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"mse": squared_error(output, scaled(batch["images"]))}

    @override
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        if not network.training or self.epoch >= self.pretrain_epochs:
            return super().evaluate(network, batch, generator)
        images = scaled(batch["images"])
        chance = Chance(near(generator, images.device), explore=True)
        level = self.trained[self.sample_level(generator)]
        autoencoder = cast(ImageAutoencoder, network)
        forced = teacher_forced(autoencoder, images, level.schedule, chance)
        # As in `surrogate`, the score contributes a gradient but no value.
        score = forced.score - forced.score.detach()
        loss = (forced.losses + score + forced.unmerging).mean()
        return LossAndMetrics(
            loss + self.penalty(forced.norm), {"mse": forced.losses.detach()}
        )

    @override
    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        mean = self.mean_image.to(batch["images"].device)
        return {"mean_image": squared_error(scaled(batch["images"]), mean)}

    @cached_property
    def mean_image(self) -> Tensor:
        """Mean image of the training set, ``(H, W, C)`` in [0, 1]."""
        return scaled(self.images["train"]).mean(0)

    @override
    @torch.no_grad()
    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        from marl_pool.studies.hierarchical.plots import draw_reconstructions

        files = super().finish(network, folder, generator)
        images = scaled(self.images["test"][:SHOWN])
        chance = Chance(generator, explore=False)
        rows = {f"{self.num_tokens} tokens, originals": images}
        for level in self.measured:
            output = network(images, level.schedule, chance).output
            error = float((output - images).square().mean())
            tokens = f"{level.tokens} token{'s' if level.tokens > 1 else ''}"
            rows[f"{tokens}, MSE of these {error:.4f}"] = output.clamp(0, 1)
        draw_reconstructions(rows, folder / "reconstructions.png")
        return [*files, folder / "reconstructions.png"]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute the mean squared error over pixels and channels, ``(B,)``."""
    return (output - target).square().mean((1, 2, 3))
