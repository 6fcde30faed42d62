"""Settings of training runs, as typed dataclasses without torch or RLlib."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_type_hints

from pydantic import Field
from pydantic_core import to_jsonable_python

from marl_pool.options.types import (
    Device,
    Episodes,
    Examples,
    Kernels,
    KLEstimate,
    LearningRate,
    LearningRateSchedule,
    NonNegativeFloat,
    Options,
    PositiveFloat,
    PositiveInt,
    Probability,
    Processes,
    ProcessesOrZero,
    Repeats,
    Seed,
    StorageURL,
    UnitInterval,
)
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.envs.description import EnvDescription

PlugIn = Annotated[str, Field(pattern=":", description="package.module:Class")]


@dataclass(frozen=True)
class PPOSettings:
    """Settings of PPO; the defaults, ``ppo=fast``, are tuned for speed on a CPU.

    ``ppo=paper`` has the values of the AdaPool paper (https://arxiv.org/abs/2506.09215,
    Table 11).

    Raises:
        InputError: a minibatch larger than the batch.
    """

    num_envs: Episodes = 64
    """Environments that each runner steps together."""
    batch_size: Examples = 2048
    """Agent steps in one iteration, over all runners."""
    minibatch_size: Examples | None = 512
    """Agent steps in one gradient step, or None for the whole batch."""
    num_epochs: PositiveInt = 3
    """Passes over each batch."""
    max_seq_len: PositiveInt = 32
    """Longest training sequence of a recurrent policy, in steps."""
    lr: LearningRate = 3.5e-3
    """Learning rate of Adam, at the start if a schedule changes it."""
    lr_schedule: LearningRateSchedule = "constant"
    """constant, or linear: from ``lr`` at the start to zero at ``total_steps``. A run
    resumed with another ``total_steps`` continues on the line of the new total."""
    gamma: UnitInterval = 0.9
    """Discount factor per step."""
    gae_lambda: UnitInterval = 0.9
    """λ of the generalized advantage estimate."""
    clip: PositiveFloat = 0.2
    """Distance of the probability ratio from 1 at which it is clipped."""
    value_coeff: NonNegativeFloat = 0.3
    """Weight of the value loss."""
    normalize_value_loss: bool = True
    """Divide the value loss by the variance of the targets plus the mean squared error
    of the recorded values, so that its weight is independent of the rewards' units."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl_coeff: NonNegativeFloat = 0.0
    """Initial weight of the KL penalty; 0 for none."""
    kl_target: PositiveFloat = 0.01
    """Target of the KL divergence, to which the penalty's weight adapts."""
    kl_estimate: KLEstimate = "last"
    """Divergence that is compared with the target after an update: last, of its last
    minibatch, as in RLlib's new API stack; or mean, over all its minibatches, as in
    the old one. The metric ``kl`` is the same."""
    grad_clip: PositiveFloat | None = 10.0
    """Largest global norm of the gradient, or None for no limit."""
    dropout: Probability = 0.0
    """Dropout of the encoder, if it has any, in the learner only unless
    ``dropout_in_sampler``. Above 0 the probability ratio of an update does not start at
    1."""
    dropout_in_sampler: bool = False
    """Sample with ``dropout`` too, new in each step, in actions and recorded values."""
    token_dropout: Probability = 0.0
    """Probability that a token, never the agent's own, is hidden in the learner only:
    sampling and evaluation see all tokens. As with ``dropout``, the probability ratio
    does not start at 1."""
    value_clip: PositiveFloat | None = None
    """Upper limit of a value's squared error in the loss, or None for no limit."""
    value_norm: bool = False
    """Let critics predict returns in units of their running mean and deviation, as in
    the published MAPPO. It takes the place of ``normalize_value_loss``."""
    share_reward: bool = False
    """Reward each agent of a group with the mean over the agents that are present; one
    that leaves gets no more."""

    def __post_init__(self) -> None:
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise InputError(
                f"ppo.minibatch_size: expected at most ppo.batch_size = "
                f"{self.batch_size}, got {self.minibatch_size}"
            )


@dataclass(frozen=True)
class CheckpointSettings:
    """Interval and number of checkpoints of a run."""

    every: PositiveInt = 20
    """Iterations from one checkpoint to the next."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep, besides the best one."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run of any kind, and base of the typed configurations.

    Keyword-only fields are sections.
    """

    verb: ClassVar[str]
    """Command that creates such a run."""
    seed: Seed = 0
    """Seed of environments, initial weights and every other random choice."""
    time_limit: PositiveFloat | None = None
    """Seconds after which training ends with its iteration, or None for no limit."""
    threads: Repeats = 2
    """CPU threads of torch in the main process."""
    kernels: Kernels = "auto"
    """Computation of narrow set networks: torch; native, the compiled kernel of the
    device where the network fits; or auto, native if there is one, else torch."""
    device: Device = "cpu"
    """Device of environments, policies and learner in the main process."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """Interval and number of checkpoints."""
    storage: StorageURL | None = None
    """fsspec URL, such as s3://bucket/runs, below which the run's folder is mirrored
    after each checkpoint, or None for no mirror."""
    callbacks: list[str] = field(default_factory=list)
    """Callbacks after each iteration: wandb (Weights & Biases) or package.module:Class
    names of subclasses of marl_pool.training.callbacks.Callback."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Convert checked plain data, as in ``run.config``; the inverse of `plain`."""
        hints, values = get_type_hints(cls), dict[str, Any]()
        for name in (f.name for f in fields(cls) if f.name in plain):
            hint, value = hints[name], plain[name]
            is_section = hint is Options or is_dataclass(hint)
            values[name] = hint(**value) if is_section else value
        return cls(**values)

    @property
    def plain(self) -> dict[str, Any]:
        """Plain data, as in ``config.yaml``: sections first, then settings."""
        values = to_jsonable_python(self)
        ordered = sorted(fields(self), key=lambda item: not item.kw_only)
        return {item.name: values[item.name] for item in ordered}


@dataclass(frozen=True)
class EpisodeRunConfig(RunConfig):
    """Settings of a run that plays episodes."""

    env_timeout: PositiveFloat | None = None
    """Seconds that one step or reset of all environments of a process may take before
    the run ends with a line that names the environment. None is no limit in the
    main process, and 600 in other processes."""


@dataclass(frozen=True)
class ResourceSettings:
    """Processes and GPUs of a run, in RLlib's terms."""

    num_env_runners: ProcessesOrZero = 0
    """Processes that sample; 0: the main process samples."""
    num_learners: ProcessesOrZero = 0
    """Processes that learn; 0: the main process learns."""
    num_gpus_per_env_runner: NonNegativeFloat = 0
    """GPUs of each runner; fractions are allowed."""
    num_gpus_per_learner: NonNegativeFloat = 0
    """GPUs of each learner; fractions are allowed. Without num_learners, 1 puts
    the learner on a GPU though ``device`` is cpu."""
    address: str | None = None
    """Address of a Ray cluster ("auto", "host:port"); None joins the one in the
    environment variable RAY_ADDRESS, or starts a local one."""


def validate_gpus(kind: str, processes: int, gpus: float, limit: int = 0) -> None:
    """Reject GPUs of processes that a run does not have.

    Args:
        kind: what the processes are, as in the key ``resources.num_gpus_per_KIND``.
        processes: number of processes; without any, the main process does their work.
        gpus: GPUs of each.
        limit: GPUs that the main process can use.
    """
    if not processes and gpus > limit:
        raise InputError(
            f"resources.num_gpus_per_{kind}: expected at most {limit} without "
            f"separate processes (num_{kind}s), got {gpus:g}"
        )


@dataclass(frozen=True)
class TrainSettings(EpisodeRunConfig):
    """Settings of the run itself, not of one of its parts."""

    modules: dict[str, str] | None = None
    """Group that learns → name of its module, or None for one module each."""
    fixed: dict[str, str] | None = None
    """Group that does not learn → heuristic, random, package.module:Class of a
    policy, or the policy to freeze: the folder of a policy or run, pretrained=NAME or
    hf://…. With None all groups learn."""
    init: str | None = None
    """Policies to start with, of the same form: the folder of a policy or run,
    pretrained=NAME or hf://…. If a folder has only one policy, all groups start with
    it. With None the initial weights are random."""
    plugins: list[PlugIn] = field(default_factory=list)
    """``package.module:Class`` names that folders of frozen or initial policies may
    use."""
    total_steps: PositiveInt = 1_000_000
    """Environment steps after which training ends, summed over all environments."""
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    """Processes and GPUs."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainSettings):
    """Configuration of a PPO run."""

    verb = "train"
    env: Options
    encoder: Options
    pooling: Options
    policy: Options
    critic: Options = field(default_factory=lambda: Options(name="own"))
    ppo: PPOSettings
    perturbation: Options

    def batch_unit(self, env: "EnvDescription") -> int:
        """Return the number of agents that learn in one step of all environments.

        ``ppo.batch_size`` is a multiple of it.
        """
        learning = sum(
            group.num_agents
            for name, group in env.groups.items()
            if name not in (self.fixed or ())
        )
        if env.turn_based:
            learning = min(1, learning)
        return self.ppo.num_envs * max(1, self.resources.num_env_runners) * learning


@dataclass(frozen=True)
class ValidationSettings:
    """Settings of validation, which selects the best solution of an evolution run."""

    every: PositiveInt = 10
    """Generations from one validation to the next; the first and the last generation
    are validated, too. A finished run that is resumed with more generations has
    validated its former last one."""
    episodes: Episodes = 512
    """Episodes of a validation, the same ones every time."""


@dataclass(frozen=True)
class WorkerSettings:
    """Processes that sample the episodes of a generation."""

    num_workers: ProcessesOrZero = 0
    """Processes that sample; 0: the main process samples in batches, without ray."""
    num_gpus_per_worker: NonNegativeFloat = 0
    """GPUs of each worker; fractions are allowed."""
    address: str | None = None
    """Address of a Ray cluster ("auto", "host:port"); None joins the one in the
    environment variable RAY_ADDRESS, or starts a local one."""


@dataclass(frozen=True)
class EvolveSettings(EpisodeRunConfig):
    """Settings of an evolution run itself, not of one of its parts."""

    init: str = "policy"
    """Start of the search: policy (the agent's initial weights), zeros, the folder of a
    policy or run, pretrained=NAME or hf://…."""
    plugins: list[PlugIn] = field(default_factory=list)
    """``package.module:Class`` names that the folder ``init`` may use."""
    repetitions: Episodes = 16
    """Episodes over which a member's fitness is averaged: the same for all members of a
    generation, and new ones in the next generation."""
    total_generations: PositiveInt = 1000
    """Generations after which the search ends."""
    fitness_env: dict[str, Any] = field(default_factory=dict)
    """Options of the environment that differ where fitness is measured, such as another
    reward. Validation, which selects the best solution, uses the unchanged ``env``."""
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    """Validation, which selects the best solution."""
    max_envs: Episodes | None = None
    """Largest number of environments that a process steps together; larger populations
    are split. None is 8192 or, for simulators, ``repetitions``."""
    resources: WorkerSettings = field(default_factory=WorkerSettings)
    """Processes and GPUs."""


@dataclass(frozen=True, kw_only=True)
class EvolveConfig(EvolveSettings):
    """Configuration of an evolution run."""

    verb = "evolve"
    env: Options
    policy: Options
    evolution: Options
    perturbation: Options


@dataclass(frozen=True)
class SweepSettings:
    """Settings of the execution of a sweep, which do not affect its results."""

    concurrency: Processes | None = None
    """Simultaneous trials, or None for as many as the CPUs allow."""
    cpus_per_trial: Processes = 1
    """CPUs, and threads of torch, of each trial's main process."""
    gpus_per_trial: NonNegativeFloat = 0
    """GPUs of each trial's main process; fractions are allowed."""
    seed_sd: PositiveFloat | None = None
    """Standard deviation of the return between seeds, if known from earlier runs."""
    trials: PositiveInt = 20
    """Trials of a search, which has no grid."""
    metric: str | None = None
    """Column of metrics.csv whose best value a search maximizes or, with a minus in
    front, minimizes. None is return_mean, and for a fit the validation metric."""
    asha: bool = True
    """Stop trials of a search early that do worse than others, by asynchronous
    successive halving (https://arxiv.org/abs/1810.05934)."""
    address: str | None = None
    """Address of a Ray cluster ("auto", "host:port"); None joins the one in the
    environment variable RAY_ADDRESS, or starts a local one."""


@dataclass(frozen=True)
class StudySettings(TrainSettings):
    """Settings of a study of many runs, and of each of its runs."""

    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Key → its values; every combination of values is a trial."""
    sweep: SweepSettings = field(default_factory=SweepSettings)
    """Settings of the execution."""
