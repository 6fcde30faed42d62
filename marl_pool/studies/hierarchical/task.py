"""Base of the hierarchical tasks: images, merging schedules, training."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.encoders.merging import MergingPolicy
from marl_pool.studies.hierarchical.dependence import dependence, divergences
from marl_pool.studies.hierarchical.encoder import Chance
from marl_pool.studies.hierarchical.estimator import Credit, check_credit, surrogate
from marl_pool.studies.hierarchical.networks import (
    ImageAutoencoder,
    MergedClassifier,
    NetworkOutput,
)
from marl_pool.studies.hierarchical.schedule import (
    check_schedule,
    depth_probabilities,
    merging_schedule,
    rho_at,
    sample_depth,
)
from marl_pool.studies.hierarchical.settings import Gradient, Hierarchy, LogProb
from marl_pool.training.supervised.images.images import (
    Dataset,
    check_patch,
    first_images,
    load_images,
    resize,
)
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Part,
    Split,
    Task,
    validate_no_part,
)
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


class MergedImages(Task):
    """Images as patches that merge, layer by layer.

    Training samples one of ``proportions`` for each batch, and a depth by the
    stochastic merging schedule; validation and test use the full depth and greedy
    choices. The loss is `surrogate` plus `penalty`.

    Source: Nair and Lieck, *Hierarchical Transformers*, sections 3 and 4, Table 3.

    Args:
        dataset: data set, whose files are in ``data_dir``.
        size: side of an image, in pixels; 28 are padded to 32, or averaged to 16 or 14.
        patch: side of a patch, in pixels, a divisor of ``size``.
        num_samples: images for training and validation; None: all.
        num_test: images of the test set; None: all.
        fourier_bands: frequencies of the pixels' positions.
        dim: width of a token.
        num_heads: attention heads, a divisor of ``dim``.
        policy_heads: heads of the merging policy, a divisor of ``dim``.
        num_layers: number of encoder and of decoder layers.
        policy: learned, shared_keys, heuristic or random; see `MergingLayer`.
        attention: use transformer blocks and cross-attention.
        proportions: fractions of tokens that merge in each layer, in training.
        levels: fractions for each of which the trained network is measured.
        schedule: merges of each layer, in place of both; None: use the fractions.
        rho: ρ, probability of continuing to the next layer, in the first epoch.
        rho_step: increase of ρ in each epoch, up to 1.
        proportional: sample depths with ``P(d) ∝ ρ^d``; see `depth_probabilities`.
        log_prob: masked: probability of the sampling procedure; unmasked: the paper's.
        credit: weight of a sample's log-probability: its own loss or the batch's.
        baseline: subtract the mean loss of the other samples.
        gradient: gradient of the choices: reinforce, or scaling by probabilities (A.4).
        through_tokens: propagate the score's gradient into the tokens.
        token_noise: standard deviation of noise on a layer's input tokens (3.2.1).
        token_penalty: λ, weight of the tokens' squared norm.
        pretrain_epochs: epochs of teacher forcing at the start (3.2.2), at the full
            depth of a sampled proportion. Each layer's choices are weighted by the
            layer's own error; ρ and the credit have no effect.
        encoder: must be None, because the task has its own.
        pooling: must be None.
        dropout: dropout probability in the feed-forward parts.
        data_dir: folder of the files.
        download: download missing files.

    Raises:
        InputError: incompatible sizes, or a schedule with more merges than pairs.
    """

    name: str
    """Name of the task, for messages."""
    has_decoder: bool
    """True if a decoder unmerges the tokens."""

    def __init__(
        self,
        *,
        dataset: Dataset = "fashion_mnist",
        size: PositiveInt = 32,
        patch: PositiveInt = 2,
        num_samples: PositiveInt | None = None,
        num_test: PositiveInt | None = None,
        fourier_bands: PositiveInt = 64,
        dim: PositiveInt = 256,
        num_heads: PositiveInt = 8,
        policy_heads: PositiveInt = 1,
        num_layers: PositiveInt = 8,
        policy: MergingPolicy = "learned",
        attention: bool = True,
        proportions: tuple[UnitInterval, ...] = (1.0,),
        levels: tuple[UnitInterval, ...] = (0.25, 0.5, 1.0),
        schedule: tuple[NonNegativeInt, ...] | None = None,
        rho: UnitInterval = 0.05,
        rho_step: NonNegativeFloat = 0.01,
        proportional: bool = False,
        log_prob: LogProb = "masked",
        credit: Credit = "own",
        baseline: bool = False,
        gradient: Gradient = "reinforce",
        through_tokens: bool = False,
        token_noise: NonNegativeFloat = 0.0,
        token_penalty: NonNegativeFloat = 0.0,
        pretrain_epochs: NonNegativeInt = 0,
        encoder: Part | None,
        pooling: Part | None,
        dropout: float,
        data_dir: str | None,
        download: bool,
    ) -> None:
        validate_no_part("encoder", encoder, self.name)
        validate_no_part("pooling", pooling, self.name)
        check_credit(credit, baseline)
        if pretrain_epochs and not self.has_decoder:
            raise InputError(
                f"task.pretrain_epochs: expected 0 with task={self.name}, which has no "
                f"decoder, got {pretrain_epochs}"
            )
        check_patch(size, patch)
        self.dataset, self.size, self.patch = dataset, size, patch
        self.num_samples, self.wanted_test = num_samples, num_test
        self.bands, self.num_layers = fourier_bands, num_layers
        self.data_dir, self.download = data_dir, download
        self.hierarchy = Hierarchy(
            dim=dim,
            num_heads=num_heads,
            policy_heads=policy_heads,
            dropout=dropout,
            policy=policy,
            attention=attention,
            log_prob=log_prob,
            gradient=gradient,
            through_tokens=through_tokens,
            token_noise=token_noise,
        )
        self.num_tokens = (size // patch) ** 2
        self.trained = self._levels("task.proportions", proportions, schedule)
        self.levels = self._levels("task.levels", levels, schedule)
        self.rho, self.rho_step, self.proportional = rho, rho_step, proportional
        self.credit: Credit = credit
        self.baseline, self.token_penalty = baseline, token_penalty
        self.pretrain_epochs = pretrain_epochs
        self.epoch = 0

    def _levels(
        self,
        where: str,
        proportions: Sequence[float],
        schedule: Sequence[int] | None,
    ) -> list[Level]:
        if schedule is not None:
            check_schedule("task.schedule", self.num_tokens, schedule)
            return [Level(list(schedule), self.num_tokens - sum(schedule))]
        if not proportions:
            raise InputError(f"{where}: expected at least one number, got []")
        found = []
        for each in proportions:
            merges = merging_schedule(self.num_tokens, each, self.num_layers)
            found.append(Level(merges, self.num_tokens - sum(merges)))
        return found

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
        shape = self._images["train"].shape[1:]
        self.shape = (shape[0], shape[1], shape[2])

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``images (B, H, W, C)`` uint8 and ``labels (B,)``."""
        return {
            "images": self._images[split][rows],
            "labels": self._labels[split][rows],
        }

    @abstractmethod
    def make_network(self, seed: int) -> ImageAutoencoder | MergedClassifier:
        """Build the network; see `initialize`."""

    @abstractmethod
    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute ``(B,)`` values for each example by name, the loss first."""

    def begin_epoch(self, network: nn.Module, epoch: int, epochs: int) -> None:
        """Set ρ, without counting the epochs of teacher forcing."""
        self.epoch = epoch
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

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        """Train on a sampled schedule, or measure at every level."""
        images = scaled(batch["images"])
        chance = Chance(near(generator, images.device), network.training)
        if not network.training:
            return self._measure(network, images, batch, chance)
        # Merge a random proportion of tokens, down to a random depth.
        number = self.sample_level(generator)
        depth = sample_depth(self.depths[number], generator)
        answer = network(images, self.trained[number].schedule[:depth], chance)
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
        for level in self.levels:
            answer: NetworkOutput = network(images, level.schedule, chance)
            for name, each in self.losses(answer.output.float(), batch).items():
                metrics[f"{name}_{level.tokens}"] = each
                metrics[name] = metrics.get(name, 0) + each / len(self.levels)
        if self.num_tokens > 1 and self.hierarchy.policy != "random":
            metrics["policy_information"] = divergences(
                self.policies(network, images, chance)
            )
        return LossAndMetrics(metrics[self.metric].mean(), metrics)

    def policies(self, network: nn.Module, images: Tensor, chance: Chance) -> Tensor:
        """Compute the pair probabilities of the first merge, ``(B, T, T)``."""
        assert isinstance(network.patches, nn.Module)
        assert isinstance(network.encoder, nn.Module)
        first_policy = network.encoder.first_policy
        assert callable(first_policy)
        found = first_policy(network.patches(images), chance)
        assert isinstance(found, Tensor)
        return found

    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        """Plot merging policies and their dependence on the image."""
        # A single token has no pair to merge.
        if self.num_tokens == 1:
            return []
        from marl_pool.studies.hierarchical.plots import draw_policies

        network.eval()
        images = scaled(self._images["test"][:POLICY_IMAGES])
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
