"""What an evaluation and a video can be told, as dataclasses without torch."""

from dataclasses import dataclass, field
from typing import Any, Literal

from marl_pool.utils.types import (
    Device,
    NonNegativeInt,
    PositiveInt,
    Seed,
)

Checkpoint = Literal["best", "last"] | NonNegativeInt
"""Which of a run's saved policies: the best, the last or that of an iteration."""
Analysis = Literal["regression", "latents", "codes", "patches"]
"""What an evaluation may look at beside returns; see `evaluation.analyses`."""


@dataclass(frozen=True)
class EnvChange:
    """A world that differs from the trained one, as a row of an evaluation."""

    label: str
    """Of the row."""
    env: dict[str, Any]
    """Options of the env that differ; an env without one of them is a gap."""
    rescale_codes: bool = False
    """Make sums over more tokens as large as in training; see `rescaled`."""


@dataclass(frozen=True)
class EvaluateSettings:
    """How a trained policy is measured."""

    episodes: PositiveInt = 256
    """Episodes for each perturbation and severity."""
    stochastic: bool = False
    """Measure the sampled policy beside the deterministic one."""
    perturbations: list[dict[str, Any]] = field(default_factory=list)
    """``{"name": …, "severities": [...], **options}``; clean runs in any case."""
    worlds: list[dict[str, Any]] = field(default_factory=list)
    """`EnvChange` each: other worlds, in which the policy plays unperturbed."""
    analyses: list[Analysis] = field(default_factory=list)
    """What else is looked at."""
    pretrained: str | None = None
    """A policy shipped with the package, in place of a run."""
    rescale_codes: bool = False
    """Make sums over more tokens as large as in training; see `rescaled`."""
    checkpoint: Checkpoint = "best"
    """Which of the run's policies."""
    seed: Seed = 0
    """Of the evaluation's worlds, which training never meets."""
    device: Device = "cpu"
    """Where worlds and policy live."""
    threads: PositiveInt = 2
    """CPU threads of torch."""


@dataclass(frozen=True)
class DiagnoseSettings:
    """How signal loss and relation scores of a trained policy are measured."""

    episodes: PositiveInt = 64
    """Episodes that the policy plays."""
    max_observations: PositiveInt = 8192
    """Of each group of agents; of more than that, every n-th step is taken."""
    pretrained: str | None = None
    """A policy shipped with the package, in place of a run."""
    checkpoint: Checkpoint = "best"
    """Which of the run's policies."""
    seed: Seed = 0
    """Of the evaluation's worlds, which training never meets."""
    device: Device = "cpu"
    """Where worlds and policy live."""
    threads: PositiveInt = 2
    """CPU threads of torch."""


@dataclass(frozen=True)
class RenderSettings:
    """How a video of a trained policy is made."""

    episodes: PositiveInt = 1
    """Episodes, one after the other; of each row."""
    rows: PositiveInt = 1
    """Episodes at a time, in rows."""
    beside_clean: bool = False
    """Show the same episodes unperturbed, too, in a column of their own."""
    attention: bool = True
    """Draw the pooling head's weights as lines, where it has any."""
    head: Literal["mean"] | NonNegativeInt = "mean"
    """Which attention head is drawn: the mean of all, or the number of one."""
    top_patches: NonNegativeInt = 0
    """Outline so many patches that get most attention, in place of tints; 0: tint."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely one."""
    pretrained: str | None = None
    """A policy shipped with the package, in place of a run."""
    rescale_codes: bool = False
    """Make sums over more tokens as large as in training; see `rescaled`."""
    checkpoint: Checkpoint = "best"
    """Which of the run's policies."""
    seed: Seed = 0
    """Of the video's worlds."""
    size: PositiveInt = 512
    """Height and width in pixels."""
    fps: PositiveInt = 20
    """Frames a second."""
    device: Device = "cpu"
    """Where worlds and policy live."""
    threads: PositiveInt = 2
    """CPU threads of torch."""


@dataclass(frozen=True)
class ReportSettings:
    """What a page about runs holds beside their numbers."""

    videos: bool = True
    """Embed a short video of each method."""
    evaluate: bool = False
    """Evaluate runs that lack an evaluation, with the keys of ``evaluate``."""
    threads: PositiveInt = 2
    """CPU threads of torch."""
