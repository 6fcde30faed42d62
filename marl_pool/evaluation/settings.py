"""Settings of `evaluate`, `render`, `play` and `report`; imported without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from marl_pool.options.names import unknown
from marl_pool.options.plugins import Registry
from marl_pool.options.types import (
    Device,
    Episodes,
    Kernels,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Repeats,
    Seed,
    Size,
)
from marl_pool.utils.errors import InputError

Checkpoint = Literal["best", "last"] | NonNegativeInt
"""A saved policy of a run: the best, the last, or the number of an iteration."""
VideoFormat = Literal["webm", "mp4", "gif", "webp"]
ANALYSES = Registry[str]("analysis", {})
"""Functions from installed packages that analyze an evaluation, by short name."""


@dataclass(frozen=True)
class TransferSettings:
    """An environment that differs from the trained one: a row of an evaluation."""

    label: str
    """Name of the row."""
    env: dict[str, Any]
    """Changed options of the env; an option that it lacks gives no numbers."""
    rescale_codes: bool = False
    """Rescale AttentionNeuron's codes, sums over tokens, to training's token count."""


@dataclass(frozen=True)
class PerturbationLevels:
    """A perturbation and the severities it is measured at.

    Attributes:
        name: registered name, or ``package.module:Class``.
        severities: numbers in [0, 1].
        options: other arguments of the perturbation's constructor.
    """

    name: str
    severities: Sequence[float]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> "PerturbationLevels":
        """Read a checked ``{"name": …, "severities": […], **options}``."""
        options = dict(entry)
        return cls(options.pop("name"), tuple(options.pop("severities")), options)


@dataclass(frozen=True)
class TargetSettings:
    """The saved policy to load, and the environments it acts in."""

    pretrained: str | None = None
    """Name of a policy shipped with the package, in place of a run."""
    checkpoint: Checkpoint = "best"
    """Saved policy of the run: best, last, or the number of an iteration."""
    seed: Seed = 0
    """Seed of the environments, none of which occurs in training."""
    device: Device = "cpu"
    """Device of environments and policy."""
    threads: Repeats = 2
    """CPU threads of torch."""
    kernels: Kernels = "auto"
    """Computation of narrow set networks: torch; native, the compiled kernel of the
    device where the network fits; or auto, native if there is one, else torch."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Take the fields from a checked configuration, and ignore its other keys."""
        names = (item.name for item in fields(cls))
        return cls(**{name: config[name] for name in names if name in config})


@dataclass(frozen=True)
class EpisodeSettings(TargetSettings):
    """Settings of a command that plays episodes."""

    env_timeout: PositiveFloat | None = None
    """Seconds that one step or reset of all environments may take, before the command
    ends with a line that names the environment, or None for no limit."""


@dataclass(frozen=True)
class EvaluateSettings(EpisodeSettings):
    """Measurement of a trained policy."""

    episodes: Episodes = 256
    """Episodes for each perturbation and severity."""
    stochastic: bool = False
    """Measure the sampled policy in addition to the deterministic one."""
    worst_of: PositiveInt = 1
    """Samples of each perturbation under which an episode is played; above 1, the
    column worst is the mean of the lowest returns."""
    perturbations: list[dict[str, Any]] = field(default_factory=list)
    """``{"name": …, "severities": [...], **options}``; clean episodes always run."""
    transfer: list[dict[str, Any]] = field(default_factory=list)
    """``{"label": …, "env": {...}}``: other environments, played unperturbed."""
    analyses: list[str] = field(default_factory=list)
    """Names of further analyses, which installed packages provide."""

    def __post_init__(self) -> None:
        for name in self.analyses:
            if name not in ANALYSES:
                raise InputError(f"analyses: {unknown('analysis', name, ANALYSES)}")

    @property
    def perturbation_levels(self) -> list[PerturbationLevels]:
        """``perturbations``, parsed."""
        return [PerturbationLevels.from_config(entry) for entry in self.perturbations]

    @property
    def transfer_settings(self) -> list[TransferSettings]:
        """``transfer``, parsed."""
        return [TransferSettings(**entry) for entry in self.transfer]


@dataclass(frozen=True)
class RenderSettings(EpisodeSettings):
    """Video of a trained policy."""

    episodes: Episodes = 1
    """Episodes of each row, one after the other."""
    rows: Repeats = 1
    """Episodes shown at a time, in rows."""
    beside_clean: bool = False
    """Show the same episodes unperturbed in a separate column."""
    attention: bool = True
    """Draw the pooling head's attention weights as lines, if it has any."""
    head: Literal["mean"] | NonNegativeInt = "mean"
    """Attention head to draw: the mean of all, or the number of one."""
    top_patches: NonNegativeInt = 0
    """Number of most attended patches to outline in place of tints; 0 draws tints."""
    stochastic: bool = False
    """Sample actions instead of taking the most likely one."""
    size: Size = 512
    """Height and width in pixels."""
    format: VideoFormat = "webm"
    """File format; OpenCV writes webm (VP8, the fastest) and mp4 (VP9), and Pillow gif
    and webp, both from the extra plots."""
    fps: Repeats = 20
    """Frames per second; a GIF's last a multiple of 10 ms, at least 20."""


@dataclass(frozen=True)
class PlaySettings(EpisodeSettings):
    """Live page of trained policies."""

    stochastic: bool = False
    """Sample actions instead of taking the most likely one."""
    threads: Repeats = 1
    """CPU threads of torch."""


@dataclass(frozen=True)
class ReportSettings:
    """Contents of a report page besides the numbers of its runs."""

    videos: bool = True
    """Embed a short video of each method."""
    evaluate: bool = False
    """Evaluate runs that lack an evaluation, with the keys of ``evaluate``."""
    threads: Repeats = 2
    """CPU threads of torch."""
    env_timeout: PositiveFloat | None = None
    """Seconds that one step or reset of all environments may take, before the command
    ends with a line that names the environment, or None for no limit."""
