"""Base of the hierarchical tasks: images, merging schedules, training."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.studies.hierarchical.dependence import dependence, divergences
from marl_pool.studies.hierarchical.encoder import Chance, NetworkOutput
from marl_pool.studies.hierarchical.estimator import Credit, surrogate
from marl_pool.studies.hierarchical.images import ImageLayout
from marl_pool.studies.hierarchical.networks import MergingNetwork
from marl_pool.studies.hierarchical.schedule import (
    depth_probabilities,
    merging_schedule,
    rho_at,
    sample_depth,
    validate_schedule,
)
from marl_pool.studies.hierarchical.settings import Hierarchy
from marl_pool.studies.image_task import ImageTask
from marl_pool.training.supervised.images import check_patch
from marl_pool.training.supervised.task import Batch, LossAndMetrics, validate_no_part
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitInterval,
)

POLICY_IMAGES = 256
"""Test images for the comparison of merging policies after training."""


class Level(NamedTuple):
    """Degree of compression.

    Attributes:
        schedule: merges of each layer.
        tokens: number of tokens left.
    """

    schedule: list[int]
    tokens: int


@dataclass(kw_only=True, eq=False)
class MergedImages(Hierarchy, ImageTask):
    """Images as patches that merge, layer by layer.

    Training samples one of ``proportions`` for each batch, and a depth by the
    stochastic merging schedule; validation and test use the full depth and greedy
    choices. The loss is `surrogate` plus `penalty`.

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

    patch: PositiveInt = 2
    """Side of a patch, in pixels, a divisor of ``size``."""
    fourier_bands: PositiveInt = 64
    """Frequencies of the pixels' positions."""
    num_layers: PositiveInt = 8
    """Number of encoder and of decoder layers."""
    proportions: tuple[UnitInterval, ...] = (1.0,)
    """Fractions of tokens that merge in each layer, in training."""
    levels: tuple[UnitInterval, ...] = (0.25, 0.5, 1.0)
    """Fractions for each of which the trained network is measured."""
    schedule: tuple[NonNegativeInt, ...] | None = None
    """Merges of each layer, in place of both; None: use the fractions."""
    rho: UnitInterval = 0.05
    """ρ, probability of continuing to the next layer, in the first epoch."""
    rho_step: NonNegativeFloat = 0.01
    """Increase of ρ in each epoch, up to 1."""
    proportional: bool = False
    """Sample depths with ``P(d) ∝ ρ^d``; see `depth_probabilities`."""
    credit: Credit = "own"
    """Weight of a sample's log-probability: its own loss or the batch's."""
    baseline: bool = False
    """Subtract the mean loss of the other samples."""
    token_penalty: NonNegativeFloat = 0.0
    """λ, weight of the tokens' squared norm."""
    pretrain_epochs: NonNegativeInt = 0
    """Epochs of teacher forcing at the start (3.2.2), at the full depth of a sampled
    proportion. Each layer's choices are weighted by the layer's own error; ρ and the
    credit have no effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The task has an architecture of its own.
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
        # Compute the merges of each layer for the proportions and levels.
        self.num_tokens = (self.size // self.patch) ** 2
        self.trained = self._levels("task.proportions", self.proportions)
        self.measured = self._levels("task.levels", self.levels)
        self.epoch = 0

    def _levels(self, where: str, proportions: Sequence[float]) -> list[Level]:
        if self.schedule is not None:
            validate_schedule(self.num_tokens, self.schedule)
            schedules = [list(self.schedule)]
        elif proportions:
            count, layers = self.num_tokens, self.num_layers
            schedules = [merging_schedule(count, each, layers) for each in proportions]
        else:
            raise InputError(f"{where}: expected at least one number, got []")
        return [Level(each, self.num_tokens - sum(each)) for each in schedules]

    @property
    def layout(self) -> ImageLayout:
        """Layout of the images as patches, known after `prepare`."""
        return ImageLayout(self.shape, self.patch, self.fourier_bands)

    @property
    def hierarchy(self) -> Hierarchy:
        """Settings of the network, without those of the task."""
        names = [each.name for each in fields(Hierarchy)]
        return Hierarchy(**{name: getattr(self, name) for name in names})

    @abstractmethod
    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute ``(B,)`` values for each example by name, the loss first."""

    @override
    def begin_epoch(self, network: nn.Module, epoch: int, epochs: int) -> None:
        self.epoch = epoch
        # ρ does not grow in the epochs of teacher forcing.
        rho = rho_at(max(epoch - self.pretrain_epochs, 0), self.rho, self.rho_step)
        self.depths = [
            depth_probabilities(
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
        depth = sample_depth(self.depths[number], generator)
        answer = network(images, self.trained[number].schedule[:depth], chance)
        # Credit the sampled choices with the loss.
        numbers = self.losses(answer.output.float(), batch)
        losses, *_ = numbers.values()
        loss = surrogate(
            losses, answer.log_prob, credit=self.credit, baseline=self.baseline
        )
        return LossAndMetrics(
            loss + self.penalty(answer.norm),
            {name: each.detach() for name, each in numbers.items()},
        )

    def penalty(self, norm: Tensor) -> Tensor:
        """Compute the mean of ``λ ‖x'‖²``, equation 6."""
        return self.token_penalty * norm.mean()

    def _measure(
        self, network: nn.Module, images: Tensor, batch: Batch, chance: Chance
    ) -> LossAndMetrics:
        metrics: dict[str, Tensor] = {}
        # Measure each level, and the mean over levels.
        for level in self.measured:
            answer: NetworkOutput = network(images, level.schedule, chance)
            for name, each in self.losses(answer.output.float(), batch).items():
                metrics[f"{name}_{level.tokens}"] = each
                metrics[name] = metrics.get(name, 0) + each / len(self.measured)
        if self.num_tokens > 1 and self.policy != "random":
            # Information about the image, within this batch.
            policies = self.policies(network, images, chance)
            metrics["policy_information"] = divergences(policies)
        return LossAndMetrics(metrics[self.metric].mean(), metrics)

    def policies(self, network: nn.Module, images: Tensor, chance: Chance) -> Tensor:
        """Compute the pair probabilities of the first merge, ``(B, T, T)``."""
        merging = cast(MergingNetwork, network)
        return merging.encoder.first_policy(merging.patches(images), chance)

    @override
    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        # A single token has no pair to merge.
        if self.num_tokens == 1:
            return []
        from marl_pool.studies.hierarchical.plots import draw_policies

        network.eval()
        images = scaled(self.images["test"][:POLICY_IMAGES])
        policies = self.policies(network, images, Chance(generator, explore=False))
        found = dependence(policies)
        path = folder / "policies.png"
        draw_policies(images[:2], policies[:2], found, self.size // self.patch, path)
        return [path]


def scaled(images: Tensor) -> Tensor:
    """Scale uint8 images to [0, 1]."""
    return images.float() / 255


def near(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return a generator on a device, seeded by one on the CPU."""
    if device.type == "cpu":
        return generator
    seed = int(torch.randint(1 << 62, (1,), generator=generator))
    return torch.Generator(device).manual_seed(seed)
