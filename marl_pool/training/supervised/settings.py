"""Settings of supervised runs, as typed dataclasses without torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from marl_pool.options.types import (
    Examples,
    LearningRate,
    NonNegativeFloat,
    Options,
    PositiveFloat,
    PositiveInt,
    Probability,
    UnitInterval,
)
from marl_pool.training.settings import CheckpointSettings, RunConfig, SweepSettings
from marl_pool.utils.errors import InputError

DROP_AT, DROP_TO = 0.7, 0.1
"""Fraction of the steps after which ``decay=drop`` lowers the rate, and its factor:
SWARM, section 4.2."""


@dataclass(frozen=True)
class FitSettings:
    """Settings of fitting a network.

    The defaults come from the AdaPool paper (https://arxiv.org/abs/2506.09215, C.2)
    except ``epochs`` (100 there), ``folds`` (5 there), ``dropout`` (0.1 there) and
    ``validation_examples`` (all there).
    """

    epochs: PositiveInt = 10
    """Maximum passes over a fold's training examples."""
    seconds_per_fold: PositiveFloat | None = None
    """Seconds of training, without validation, after which a fold ends if ``epochs`` do
    not end it first. The learning rate schedule follows the limit that is nearer, so
    set more ``epochs`` than fit into the seconds. With None only ``epochs`` limits a
    fold. A run with a time limit cannot be reproduced exactly."""
    batch_size: Examples = 750
    """Examples of a gradient step."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """Adam, or AdamW with decoupled weight decay."""
    lr: LearningRate = 5e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the optimizer."""
    warmup: Probability = 0.0
    """Fraction of the steps in which the learning rate rises linearly from 0."""
    decay: Literal["constant", "cosine", "drop"] = "constant"
    """Learning rate after the warm-up: constant, a cosine to 0, or a drop to a tenth
    after 70 % of the steps that follow the warm-up."""
    back_tracking: bool = False
    """Return to the best weights, with 0.9 of the learning rate, after an epoch that is
    no better than each of the last 20 % of the epochs (at least 6); see
    `must_go_back`."""
    grad_clip: PositiveFloat | None = None
    """Maximum global norm of the gradient, or None for no limit."""
    folds: PositiveInt = 3
    """Parts of the training examples, each the validation set of one fold. 1: a single
    fold, split by ``validation``."""
    validation: UnitInterval = 0.1
    """Fraction of the examples for validation with ``folds=1``, in (0, 1)."""
    validation_examples: PositiveInt | None = 20_000
    """Maximum validation examples of a fold to measure, or None for all."""
    dropout: Probability = 0.0
    """Dropout probability of the encoder."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights without a special rule."""
    bfloat16: bool = False
    """Use torch's automatic mixed precision with bfloat16."""
    compile: bool = False
    """Compile the network by torch.compile; the first step takes a minute."""

    def __post_init__(self) -> None:
        if self.folds == 1 and not 0 < self.validation < 1:
            raise InputError(
                "fit.validation: expected a fraction above 0 and below 1 with "
                f"fit.folds=1, got {self.validation:g}"
            )
        if self.back_tracking and self.decay != "constant":
            raise InputError(
                "fit.decay: expected constant with fit.back_tracking, which lowers the "
                f"learning rate itself, got {self.decay}"
            )

    def epochs_over(self, fold: int, epoch: int, seconds: float) -> int:
        """Count the epochs of all folds so far, for progress.

        With a time limit, the elapsed fraction of the fold's seconds counts: 500 of
        1000 epochs after half of the time, however few there were.
        """
        elapsed = min(seconds / (self.seconds_per_fold or math.inf), 1.0)
        return int(fold * self.epochs + max(epoch, int(elapsed * self.epochs)))

    def lr_at(self, progress: float) -> float:
        """Return the learning rate at a fraction ``progress`` in [0, 1] of a fold."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        fraction = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        factor = 1.0
        if self.decay == "cosine":
            factor = (1 + math.cos(math.pi * fraction)) / 2
        elif self.decay == "drop" and fraction >= DROP_AT:
            factor = DROP_TO
        return self.lr * factor


@dataclass(frozen=True)
class FitRunSettings(RunConfig):
    """Settings of the run itself, not of one of its parts."""

    scale: Literal["tiny", "cpu", "paper"] = "cpu"
    """Size of the study: tiny (seconds), cpu (within an hour on two cores), paper
    (as published). Label only; other keys hold the sizes."""
    data_dir: str | None = None
    """Folder of data sets, read or generated, or None for one in the run's folder."""
    download: bool = False
    """Download a data set that ``data_dir`` lacks, and verify its checksum."""
    checkpoint: CheckpointSettings = field(
        default_factory=lambda: CheckpointSettings(every=1, keep=1)
    )
    """Checkpoint interval, in epochs, and number to keep."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(FitRunSettings):
    """Configuration of a supervised run."""

    verb = "fit"
    task: Options
    encoder: Options
    pooling: Options
    fit: FitSettings


@dataclass(frozen=True)
class FitStudySettings(FitRunSettings):
    """Settings of a grid of runs."""

    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Key → values; every combination is a trial."""
    sweep: SweepSettings = field(default_factory=SweepSettings)
    """Settings of running the trials."""
