"""What a cloning run can be told, as typed dataclasses without torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from marl_pool.training.settings import (
    CheckpointSettings,
    Options,
    RunConfig,
    validate_plugins,
)
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


@dataclass(frozen=True)
class CloneSettings:
    """How trajectories are collected and learned.

    Raises:
        InputError: settings that contradict each other.
    """

    episodes: PositiveInt = 64
    """Episodes that the teacher plays for training."""
    validation_episodes: PositiveInt = 8
    """Episodes that nobody is trained on, in worlds of their own; in each round."""
    num_envs: PositiveInt = 16
    """Worlds that are stepped together."""
    min_length: NonNegativeInt = 0
    """Shorter trajectories of the teacher's are left out."""
    min_return: float | None = None
    """Worse ones are left out, too; None: none is."""
    noise: UnitInterval = 0.0
    """Share of random actions in the teacher's own play; the labels stay its own."""
    rounds: NonNegativeInt = 0
    """How often the student plays, the teacher labels, and training goes on."""
    round_episodes: PositiveInt = 16
    """Episodes that the student plays for training in each round."""
    round_steps: PositiveInt | None = None
    """Steps of each of them in a round, which go on where the last round left the game:
    so states of all of a long game are met. A run that is resumed begins new games.
    None: whole episodes, new ones in each round."""
    rollout_env: dict[str, Any] = field(default_factory=dict)
    """Options of the env that are others where the student plays."""
    beta: UnitInterval = 0.0
    """The teacher takes ``beta ** round`` of the steps in a round.

    Near 1 it ruins a student that sees its previous action: that is then the
    teacher's, and to copy."""
    first_round: PositiveInt = 2000
    """Batches learned before the student plays first."""
    round_every: PositiveInt = 500
    """Batches from one round to the next."""
    batch_size: PositiveInt = 128
    """Single steps, or whole trajectories where the student remembers."""
    truncate: PositiveInt | None = None
    """Steps that a gradient goes back in time; None: the whole trajectory."""
    chunk_length: PositiveInt | None = None
    """Steps of the chunks that trajectories are cut into where the student remembers,
    each learned by itself, with a memory that starts anew. None: they are whole."""
    burn_in: NonNegativeInt = 0
    """First steps of a chunk that count nothing, if it does not begin an episode: the
    memory holds too little then."""
    soft: bool = False
    """Learn the probabilities of the teacher's choices, not only its choice."""
    margin_weighting: PositiveFloat | None = None
    """Weight steps by the margin between the teacher's best and worst logit: from 0.1
    at margin 0 to 1.1 at this margin and above. None: all steps have weight 1."""
    expected_regret: NonNegativeFloat = 0.0
    """Weight of the expected-regret loss: the margin between the teacher's best logit
    and that of the student's choice, in expectation over the student's choices."""
    auxiliary: NonNegativeFloat = 0.0
    """Weight of the auxiliary head's squared error: it predicts the teacher's
    privileged targets from the student's last hidden layer. 0: no auxiliary head."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam at the start."""
    lr_end: NonNegativeFloat = 1e-5
    """Learning rate of the last batch."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the one becomes the other; constant: it does not."""
    grad_clip: PositiveFloat | None = 1.0
    """Largest global norm of the gradient; None: no limit."""
    bfloat16: bool = False
    """Compute in bfloat16 where torch thinks that it is safe."""
    severities: tuple[Probability, Probability] | None = None
    """Bounds between which the perturbation's severity is drawn; None: it is fixed."""
    before_noise: NonNegativeFloat = 0.0
    """Noise on the previous action: for a box the standard deviation of Gaussian noise,
    also on the zeros at an episode's start; for a choice the share that is replaced by
    a random one, except at an episode's start, where there is none."""
    before_dropout: UnitInterval = 0.0
    """Share of previous actions that are replaced by none, as at an episode's start."""
    iteration_batches: PositiveInt = 100
    """Batches of an iteration: one row of metrics, one validation."""
    validation_steps: PositiveInt = 4096
    """Of all validation steps so many are measured, if the student has no memory."""
    select: Literal["loss", "return"] = "loss"
    """The best checkpoint is that of the lowest loss on the validation trajectories
    of the last round, or that of the highest return."""
    play_every: NonNegativeInt = 0
    """Iterations from one measurement of the return to the next; 0: none."""
    play_episodes: PositiveInt = 8
    """Episodes of such a measurement, in worlds of their own."""

    def __post_init__(self) -> None:
        if self.select == "return" and not self.play_every:
            raise InputError(
                "clone.play_every: expected at least 1 with clone.select=return, got 0"
            )
        if self.burn_in and self.burn_in >= min(
            length
            for length in (self.chunk_length, self.round_steps, math.inf)
            if length
        ):
            raise InputError(
                "clone.burn_in: expected fewer steps than clone.chunk_length = "
                f"{self.chunk_length} and clone.round_steps = {self.round_steps}, "
                f"got {self.burn_in}"
            )
        if self.severities is not None and self.severities[0] > self.severities[1]:
            raise InputError(
                "clone.severities: expected the lower bound first, "
                f"got {list(self.severities)}"
            )
        if self.lr_end > self.lr:
            raise InputError(
                f"clone.lr_end: expected at most clone.lr = {self.lr}, "
                f"got {self.lr_end}"
            )

    def start(self, number: int) -> int:
        """Batches after which round ``number`` begins; 0 is the teacher's own play."""
        return self.first_round + (number - 1) * self.round_every if number else 0


@dataclass(frozen=True)
class CloneRunSettings:
    """What belongs to the run itself, not to one of its parts."""

    teacher: str | None = None
    """Teacher: the folder of a run or policy, heuristic, value_table (Pong only), or
    package.module:Class of a policy. None: only with ``trajectories``."""
    trajectories: str | None = None
    """Folder of an earlier cloning run, or of its trajectories, to learn from in
    place of new ones; None: the teacher plays."""
    fixed: dict[str, str] | None = None
    """Group that is not cloned → heuristic, random, package.module:Class of a
    policy, or the folder of a policy or run. None: there is only one group."""
    plugins: list[str] = field(default_factory=list)
    """``package.module:Class`` names that those folders may use."""
    seed: Seed = 0
    """Of worlds, initial weights, perturbations and the order of batches."""
    total_batches: PositiveInt = 5000
    """Batches of all rounds, after which training ends."""
    time_limit: PositiveFloat | None = None
    """Seconds after which training ends; None: no limit."""
    threads: PositiveInt = 2
    """CPU threads of torch."""
    device: Device = "cpu"
    """Where worlds and policies live; trajectories stay in memory."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """When a run saves itself."""

    def __post_init__(self) -> None:
        validate_plugins(self.plugins)


@dataclass(frozen=True, kw_only=True)
class CloneConfig(CloneRunSettings, RunConfig):
    """Configuration of a cloning run."""

    env: Options
    policy: Options
    clone: CloneSettings
    perturbation: Options
