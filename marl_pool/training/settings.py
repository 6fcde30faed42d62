"""Settings of training runs, as typed dataclasses without torch or RLlib."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Self, get_type_hints

from marl_pool.utils.errors import InputError
from marl_pool.utils.types import (
    Device,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    UnitInterval,
)

Options = Mapping[str, Any]
"""``{"name": …, **options}`` of a registered class."""


@dataclass(frozen=True)
class PPOSettings:
    """Settings of PPO; the defaults are ``ppo=fast``, tuned for time on a CPU.

    The AdaPool paper's (Table 11) are ``ppo=paper``.

    Raises:
        InputError: a minibatch larger than the batch.
    """

    num_envs: PositiveInt = 64
    """Worlds that each runner steps together."""
    batch_size: PositiveInt = 2048
    """Agent steps of one iteration, over all runners."""
    minibatch_size: PositiveInt | None = 512
    """Agent steps of one gradient step; None: the whole batch."""
    num_epochs: PositiveInt = 3
    """Passes over each batch."""
    max_seq_len: PositiveInt = 32
    """Steps of a recurrent policy's training sequences, at most."""
    lr: PositiveFloat = 3.5e-3
    """Learning rate of Adam."""
    gamma: UnitInterval = 0.9
    """Discount of a later reward, for each step."""
    gae_lambda: UnitInterval = 0.9
    """λ of the generalised advantage estimate."""
    clip: PositiveFloat = 0.2
    """Distance that the probability ratio may leave 1 before its gradient stops."""
    value_coeff: NonNegativeFloat = 0.3
    """Weight of the value loss."""
    normalize_value_loss: bool = True
    """Divide the value loss by its scale, so that the weight means the same whatever
    the rewards' units: by the targets' variance plus the recorded values' error."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_coeff: NonNegativeFloat = 0.0
    """Initial weight of the KL penalty; 0 leaves it out."""
    kl_target: PositiveFloat = 0.01
    """KL divergence that the penalty's weight is adapted to."""
    grad_clip: PositiveFloat | None = 10.0
    """Largest global norm of the gradient; None: no limit."""
    dropout: Probability = 0.0
    """Dropout of the encoder, in the learner only; above 0 the ratio starts off 1."""
    value_clip: PositiveFloat | None = None
    """Largest squared error of a value that is counted; None: no limit."""

    def __post_init__(self) -> None:
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise InputError(
                f"ppo.minibatch_size: expected at most ppo.batch_size = "
                f"{self.batch_size}, got {self.minibatch_size}"
            )


@dataclass(frozen=True)
class CheckpointSettings:
    """When a run saves itself, and how often it keeps what it saved."""

    every: PositiveInt = 20
    """Iterations between two checkpoints."""
    keep: PositiveInt = 3
    """The newest so many are kept, and the best one."""


class RunConfig:
    """Base of the typed configurations that training receives.

    The plain data of ``config.yaml``, once checked, become one of these where a run
    begins. A section whose ``name`` chooses a class stays a mapping, `Options`.

    Attributes:
        seed: random seed of the run.
        time_limit: seconds after which training ends; None: no limit.
        threads: CPU threads of torch.
        checkpoint: when the run saves itself.
    """

    seed: int
    time_limit: float | None
    threads: int
    checkpoint: CheckpointSettings

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Build from checked plain data, as in ``run.config``."""
        values = {}
        for name, hint in _hints(cls).items():
            if name in plain:
                typed = is_dataclass(hint)
                values[name] = hint(**plain[name]) if typed else plain[name]
        return cls(**values)


def _hints(config: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(config)
    return {each.name: hints[each.name] for each in fields(config)}


@dataclass(frozen=True)
class ResourceSettings:
    """Processes and GPUs of a run, in RLlib's terms."""

    num_env_runners: NonNegativeInt = 0
    """Processes that sample; 0: the main process does."""
    num_learners: NonNegativeInt = 0
    """Processes that learn; 0: the main process does."""
    num_gpus_per_env_runner: NonNegativeFloat = 0
    """GPUs of each runner; a share is allowed."""
    num_gpus_per_learner: NonNegativeFloat = 0
    """GPUs of each learner; a share is allowed."""
    address: str | None = None
    """Address of a Ray cluster ("auto", "host:port"); None starts a local one."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of the run itself, not of one of its parts."""

    modules: dict[str, str] | None = None
    """Group that learns → name of the module that plays it; None: one for each."""
    fixed: dict[str, str] | None = None
    """Group that does not learn → heuristic, random, package.module:Class of a
    policy, or the folder of a policy or run, frozen. None: all groups learn."""
    plugins: list[str] = field(default_factory=list)
    """``package.module:Class`` names that the folder of a frozen policy may use."""
    seed: Seed = 0
    """Seed of environments, initial weights, exploration and minibatches."""
    total_steps: PositiveInt = 1_000_000
    """Environment steps, summed over all worlds, after which training ends."""
    time_limit: PositiveFloat | None = None
    """Seconds after which training ends; None: no limit."""
    threads: PositiveInt = 2
    """CPU threads of torch in the main process."""
    device: Device = "cpu"
    """Device of a local runner's environments and policy."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """When a run saves itself."""
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    """Processes and GPUs."""

    def __post_init__(self) -> None:
        check_plugins(self.plugins)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainSettings, RunConfig):
    """Configuration of a run of PPO."""

    env: Options
    encoder: Options
    pooling: Options
    policy: Options
    ppo: PPOSettings
    perturbation: Options


@dataclass(frozen=True)
class ValidationSettings:
    """Validation, which finds the solution that a run of evolution keeps."""

    every: PositiveInt = 10
    """Generations between two validations."""
    episodes: PositiveInt = 512
    """Episodes of each, always the same ones."""


@dataclass(frozen=True)
class WorkerSettings:
    """Processes that play the episodes of a generation."""

    num_workers: NonNegativeInt = 0
    """Processes that play; 0: the main process does, in batches, without ray."""
    num_gpus_per_worker: NonNegativeFloat = 0
    """GPUs of each worker; a share is allowed."""
    address: str | None = None
    """Address of a Ray cluster ("auto", "host:port"); None starts a local one."""


@dataclass(frozen=True)
class EvolveSettings:
    """Settings of a run of evolution itself, not of one of its parts.

    Raises:
        InputError: a plug-in that is no ``package.module:Class``.
    """

    init: str = "policy"
    """Start of the search: policy (the agent's own initial weights), zeros, or the
    folder of a policy or run."""
    plugins: list[str] = field(default_factory=list)
    """``package.module:Class`` names that the folder ``init`` may use."""
    seed: Seed = 0
    """Seed of environments, initial weights and the strategy."""
    repetitions: PositiveInt = 16
    """Episodes over which a member's fitness is the mean: the same for all members of
    a generation, new ones in the next."""
    total_generations: PositiveInt = 1000
    """Generations after which the search ends."""
    time_limit: PositiveFloat | None = None
    """Seconds after which the search ends; None: no limit."""
    fitness_env: dict[str, Any] = field(default_factory=dict)
    """Options of the env that differ where fitness is measured: another reward, say.
    Validation, and so the choice of the best, keeps the env as it is."""
    curriculum: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Option of the env → its values at the start and from the end of the curriculum
    on, in training; linear in between."""
    curriculum_generations: PositiveInt = 300
    """Generations that the curriculum takes."""
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    """Validation, which finds the best solution."""
    max_worlds: PositiveInt | None = None
    """Worlds that one process steps together at most; members beyond take turns.
    None: 8192, or of a simulator as many as ``repetitions``."""
    threads: PositiveInt = 2
    """CPU threads of torch in the main process."""
    device: Device = "cpu"
    """Device of environments and agents."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """When a run saves itself."""
    resources: WorkerSettings = field(default_factory=WorkerSettings)
    """Processes that play."""

    def __post_init__(self) -> None:
        check_plugins(self.plugins)


@dataclass(frozen=True, kw_only=True)
class EvolveConfig(EvolveSettings, RunConfig):
    """Configuration of a run of evolution."""

    env: Options
    policy: Options
    evolution: Options
    perturbation: Options


@dataclass(frozen=True)
class SweepSettings:
    """Settings of running the trials of a sweep, which change no result."""

    concurrency: PositiveInt | None = None
    """Trials at a time; None: as many as the CPUs allow."""
    cpus_per_trial: PositiveInt = 1
    """CPUs, and threads of torch, of each trial's main process."""
    gpus_per_trial: NonNegativeFloat = 0
    """GPUs of each trial's main process; a share is allowed."""
    seed_sd: PositiveFloat | None = None
    """Standard deviation of the return between seeds, if known from earlier runs."""
    address: str | None = None
    """Address of a Ray cluster ("auto", "host:port"); None starts a local one."""


@dataclass(frozen=True)
class StudySettings(TrainSettings):
    """Settings of a study of many runs, beside those of each run."""

    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Key → the values that it takes, each combined with those of the other keys."""
    sweep: SweepSettings = field(default_factory=SweepSettings)
    """Settings of running the trials."""


def check_plugins(plugins: list[str]) -> None:
    """Refuse what is no ``package.module:Class``."""
    for name in plugins:
        if ":" not in name:
            raise InputError(f"plugins: expected package.module:Class, got {name!r}")
