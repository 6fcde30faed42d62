"""The hierarchical tasks: reconstruct or classify images whose patches merge."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from marl_pool.options.types import (
    NonNegativeFloat,
    NonNegativeInt,
    Repeats,
    Size,
    SizeOrZero,
    UnitInterval,
)
from marl_pool.training.supervised.task import Batch, LossAndMetrics, validate_no_part
from marl_pool.utils.errors import InputError
from marl_pool_studies.hierarchical import choices
from marl_pool_studies.hierarchical.layers import Chance, Hierarchy, NetworkOutput
from marl_pool_studies.hierarchical.networks import (
    ImageAutoencoder,
    ImageLayout,
    MergedClassifier,
    MergingNetwork,
    teacher_forced,
)
from marl_pool_studies.hierarchical.plots import draw_policies, draw_reconstructions
from marl_pool_studies.image_task import ImageTask, error_of
from marl_pool_studies.images import check_patch

POLICY_IMAGES = 256
"""Test images for the comparison of merging policies after training."""
SHOWN = 8
"""Test images in the plot of reconstructions."""


class Level(NamedTuple):
    """Degree of compression."""

    schedule: list[int]
    """Merges of each layer."""
    tokens: int
    """Number of remaining tokens."""


@dataclass(kw_only=True, eq=False)
class MergedImages(Hierarchy, ImageTask):
    """Images as patches that merge, layer by layer.

    Training samples one of ``proportions`` for each batch, and a depth by the
    stochastic merging schedule; validation and test use the full depth and greedy
    choices. The loss is `surrogate` plus the penalty of the tokens' norm.

    Source: Nair and Lieck, *Hierarchical Transformers*, sections 3 and 4, Table 3.

    Attributes:
        trained: levels of ``proportions``.
        measured: levels of ``levels``.

    Raises:
        InputError: incompatible sizes, or a schedule with more merges than pairs.
    """

    name: ClassVar[str]
    """Name of the task, for messages."""
    has_decoder: ClassVar[bool]
    """True if a decoder unmerges the tokens."""

    patch: Size = 2
    """Side of a patch, in pixels, a divisor of ``size``."""
    fourier_bands: Size = 64
    """Frequencies of the pixels' positions."""
    num_layers: Repeats = 8
    """Number of encoder and of decoder layers."""
    proportions: tuple[UnitInterval, ...] = (1.0,)
    """Fractions of tokens that merge in each layer, in training."""
    levels: tuple[UnitInterval, ...] = (0.25, 0.5, 1.0)
    """Fractions for each of which the trained network is measured."""
    schedule: tuple[SizeOrZero, ...] | None = None
    """Merges of each layer, in place of both, or None to use the fractions."""
    rho: UnitInterval = 0.05
    """ρ, probability of continuing to the next layer, in the first epoch."""
    rho_step: NonNegativeFloat = 0.01
    """Increase of ρ in each epoch, up to 1."""
    proportional: bool = False
    """Sample depths with ``P(d) ∝ ρ^d``; see `depth_probabilities`."""
    credit: choices.Credit = "own"
    """Weight of a sample's log-probability: its own loss or the batch's."""
    baseline: bool = False
    """Subtract the mean loss of the other samples."""
    token_penalty: NonNegativeFloat = 0.0
    """λ, weight of the tokens' squared norm in the loss (equation 6)."""
    pretrain_epochs: NonNegativeInt = 0
    """Epochs of teacher forcing at the start (3.2.2), at the full depth of a sampled
    proportion. Each layer's choices are weighted by the layer's own error; ρ and the
    credit have no effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The architecture is part of the task.
        validate_no_part("encoder", self.encoder, self.name)
        validate_no_part("pooling", self.pooling, self.name)
        # A baseline subtracts the mean loss, which would leave nothing here.
        if self.baseline and self.credit == "batch":
            raise InputError(
                "task.baseline: expected false with task.credit=batch, where every "
                "sample has the same loss, got true"
            )
        if self.pretrain_epochs and not self.has_decoder:
            raise InputError(
                f"task.pretrain_epochs: expected 0 with task={self.name}, which has no "
                f"decoder, got {self.pretrain_epochs}"
            )
        check_patch(self.size, self.patch)
        self.num_tokens = (self.size // self.patch) ** 2
        self.trained = self._levels("task.proportions", self.proportions)
        self.measured = self._levels("task.levels", self.levels)
        # Metrics are named by the number of tokens.
        counts = [level.tokens for level in self.measured]
        if self.num_tokens > 1 and len({*counts}) < len(counts):
            raise InputError(
                "task.levels: expected fractions that leave different numbers of "
                f"tokens, got {list(self.levels)}, which leave {counts}"
            )
        self.epoch = 0

    def _levels(self, where: str, proportions: Sequence[float]) -> list[Level]:
        if self.schedule is not None:
            choices.validate_schedule(self.num_tokens, self.schedule)
            schedules = [list(self.schedule)]
        elif proportions:
            count, depth = self.num_tokens, self.num_layers
            schedules = [choices.merging_schedule(count, p, depth) for p in proportions]
        else:
            raise InputError(f"{where}: expected at least one number, got []")
        return [Level(merges, self.num_tokens - sum(merges)) for merges in schedules]

    @property
    def layout(self) -> ImageLayout:
        """Layout of the images as patches, known after `prepare`."""
        return ImageLayout(self.shape, self.patch, self.fourier_bands)

    @property
    def hierarchy(self) -> Hierarchy:
        """Settings of the network, without the task's."""
        options = {item.name: getattr(self, item.name) for item in fields(Hierarchy)}
        return Hierarchy(**options)

    @abstractmethod
    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute ``(B,)`` values for each example by name, the loss first."""

    @override
    def begin_epoch(self, network: nn.Module, epoch: int, epochs: int) -> None:
        self.epoch = epoch
        # ρ does not grow in the epochs of teacher forcing.
        grown = self.rho_step * max(epoch - self.pretrain_epochs, 0)
        rho = min(self.rho + grown, 1.0)
        self.depths = [
            choices.depth_probabilities(
                rho, len(level.schedule), proportional=self.proportional
            )
            for level in self.trained
        ]

    def sample_level(self, generator: torch.Generator) -> int:
        """Sample the index of a batch's proportion."""
        return int(torch.randint(len(self.trained), (1,), generator=generator))

    @override
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        images = scaled(batch["images"])
        chance = Chance(near(generator, images.device), network.training)
        # Evaluation measures all levels without sampling one.
        if not network.training:
            return self._measure(network, images, batch, chance)
        # Merge a random proportion of tokens, down to a random depth.
        number = self.sample_level(generator)
        depth = choices.sample_depth(self.depths[number], generator)
        answer = network(images, self.trained[number].schedule[:depth], chance)
        # Credit the sampled choices with the loss.
        numbers = self.losses(answer.output.float(), batch)
        losses, *_ = numbers.values()
        loss = choices.surrogate(
            losses, answer.log_prob, credit=self.credit, baseline=self.baseline
        )
        return LossAndMetrics(
            loss + self.token_penalty * answer.norm.mean(),
            {name: values.detach() for name, values in numbers.items()},
        )

    def _measure(
        self, network: nn.Module, images: Tensor, batch: Batch, chance: Chance
    ) -> LossAndMetrics:
        metrics: dict[str, Tensor] = {}
        for level in self.measured:
            answer: NetworkOutput = network(images, level.schedule, chance)
            for name, values in self.losses(answer.output.float(), batch).items():
                metrics[f"{name}_{level.tokens}"] = values
                metrics[name] = metrics.get(name, 0) + values / len(self.measured)
        if self.num_tokens > 1 and self.policy != "random":
            # Information about the image, within this batch.
            policies = cast(MergingNetwork, network).first_policy(images, chance)
            metrics["policy_information"] = choices.divergences(policies)
        return LossAndMetrics(metrics[self.metric].mean(), metrics)

    @override
    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        # A single token has no pair to merge.
        if self.num_tokens == 1:
            return []
        network.eval()
        images = scaled(self.images["test"][:POLICY_IMAGES])
        chance = Chance(generator, explore=False)
        policies = cast(MergingNetwork, network).first_policy(images, chance)
        path = folder / "policies.png"
        draw_policies(images[:2], policies[:2], choices.dependence(policies), path)
        return [path]


class Reconstruction(MergedImages):
    """Reconstruct images after merging their patches: Nair and Lieck, section 4.2.

    The loss is the squared error, the mean over pixels and channels in [0, 1];
    ``mse_27`` is the error of reconstructions from 27 tokens, ``mse`` the mean over
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
            loss + self.token_penalty * forced.norm.mean(),
            {"mse": forced.losses.detach()},
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


class MergedClassification(MergedImages):
    """Classify images by the encoder alone: Nair and Lieck, section 4.1.

    The loss is the cross-entropy. ``error_1`` is the fraction of wrong answers from one
    token, ``error`` the mean over ``levels``.
    """

    name, metric = "merged_classification", "error"
    has_decoder = False

    @override
    def make_network(self, seed: int) -> MergedClassifier:
        return MergedClassifier(self.layout, self.hierarchy, seed, self.num_classes)

    @override
    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        labels = batch["labels"]
        return {
            "cross_entropy": cross_entropy(output, labels, reduction="none"),
            "error": error_of(output, labels),
        }

    @override
    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        common = self.labels["train"].bincount().argmax().to(batch["labels"])
        return {"most_common_class": (batch["labels"] != common).float()}


def scaled(images: Tensor) -> Tensor:
    """Scale uint8 images to [0, 1]."""
    return images.float() / 255


def near(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return a generator on a device, seeded by one on the CPU."""
    if device.type == "cpu":
        return generator
    seed = int(torch.randint(1 << 62, (1,), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute the mean squared error over pixels and channels, ``(B,)``."""
    return (output - target).square().mean((1, 2, 3))
