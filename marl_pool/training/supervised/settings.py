"""Settings of supervised runs, as typed dataclasses without torch."""

from dataclasses import dataclass, field
from typing import Any, Literal

from marl_pool.training.settings import (
    CheckpointSettings,
    Options,
    RunConfig,
    SweepSettings,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import (
    Device,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    UnitInterval,
)

Decay = Literal["constant", "cosine", "drop"]
Scale = Literal["tiny", "cpu", "paper"]


@dataclass(frozen=True)
class FitSettings:
    """Settings of fitting a network.

    The defaults are the AdaPool paper's (C.2) but for ``epochs`` (100 there), ``folds``
    (5 there), ``dropout`` (0.1 there) and ``validation_examples`` (all, there).

    Raises:
        InputError: settings that contradict each other.
    """

    epochs: PositiveInt = 10
    """Passes over a fold's training examples, at most."""
    seconds_per_fold: PositiveFloat | None = None
    """Seconds of training, measuring not counted, after which a fold ends and to which
    the schedule is stretched; None: ``epochs`` alone say. With a limit a run cannot be
    repeated exactly."""
    batch_size: PositiveInt = 750
    """Examples of a gradient step."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """Adam, or AdamW, whose weight decay is apart from the gradient."""
    lr: PositiveFloat = 5e-4
    """The largest learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the optimizer."""
    warmup: Probability = 0.0
    """Share of the steps in which the learning rate rises from 0."""
    decay: Decay = "constant"
    """Learning rate after that: constant, a cosine to 0, or a drop to a tenth after
    70 % of the steps."""
    back_tracking: bool = False
    """Go back to the best weights, with 0.9 of the learning rate, whenever more than a
    fifth of the epochs so far, and more than 5, were no worse than the last one in a
    row, as in SWARM's published code (the text, 4.1.3, is a little stricter)."""
    grad_clip: PositiveFloat | None = None
    """Largest global norm of the gradient; None: no limit."""
    folds: PositiveInt = 3
    """Parts of the training examples, each the validation set of one fold. 1: one fold,
    with the share ``validation``."""
    validation: UnitInterval = 0.1
    """Share of the examples that validate if there is one fold; above 0, below 1."""
    validation_examples: PositiveInt | None = 20_000
    """Validation examples of a fold that are measured; None: all."""
    dropout: Probability = 0.0
    """Dropout of the encoder, while it learns."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights, where a part has no rule of its own."""
    bfloat16: bool = False
    """Compute in bfloat16 where torch thinks that it is safe (mixed precision)."""
    compile: bool = False
    """Compile the network by torch.compile; the first step takes a minute."""

    def __post_init__(self) -> None:
        if self.folds == 1 and not 0 < self.validation < 1:
            raise InputError(
                "fit.validation: expected a share above 0 and below 1 with "
                f"fit.folds=1, got {self.validation:g}"
            )
        if self.back_tracking and self.decay != "constant":
            raise InputError(
                "fit.decay: expected constant with fit.back_tracking, which lowers the "
                f"learning rate itself, got {self.decay}"
            )

    def epochs_over(self, fold: int, epoch: int, seconds: float) -> int:
        """Count the epochs of all folds that are over, all of a fold's when it is.

        Where seconds end a fold, the share of them that is over counts: of 1000 epochs
        500 after half of the seconds, however few those were.

        Args:
            fold: number of the fold, from 0.
            epoch: epochs of this fold.
            seconds: of training in this fold.
        """
        limit = self.seconds_per_fold
        share = 0.0 if limit is None else min(seconds / limit, 1.0)
        return int(fold * self.epochs + max(epoch, int(share * self.epochs)))


@dataclass(frozen=True)
class FitRunSettings:
    """Settings of the run itself, not of one of its parts."""

    scale: Scale = "cpu"
    """Size of the study: tiny (seconds), cpu (within an hour on two cores), paper
    (as published). A label: its sizes are in the other keys."""
    data_dir: str | None = None
    """Folder of data sets; generated data are kept there, too. None: in the run."""
    download: bool = False
    """Fetch a data set that ``data_dir`` lacks, and check its checksum."""
    seed: Seed = 0
    """Seed of folds, initial weights and the order of batches."""
    time_limit: PositiveFloat | None = None
    """Seconds after which the run ends and can be resumed; None: no limit."""
    threads: PositiveInt = 2
    """CPU threads of torch."""
    device: Device = "cpu"
    """Device of the network."""
    checkpoint: CheckpointSettings = field(
        default_factory=lambda: CheckpointSettings(every=1, keep=1)
    )
    """When a run saves itself, in epochs."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(FitRunSettings, RunConfig):
    """Configuration of a supervised run."""

    task: Options
    encoder: Options
    pooling: Options
    fit: FitSettings


@dataclass(frozen=True)
class FitStudySettings(FitRunSettings):
    """The keys of a run, and a grid of values that some of them take."""

    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Key → values; every combination is a trial."""
    sweep: SweepSettings = field(default_factory=SweepSettings)
    """Settings of running the trials."""
