"""Settings of cloning runs, as typed dataclasses without torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from marl_pool.options.types import (
    Episodes,
    Examples,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
)
from marl_pool.training.settings import EpisodeRunConfig, PlugIn
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class CloneSettings:
    """Settings of collecting trajectories and learning from them."""

    episodes: Episodes = 64
    """Training episodes that the teacher plays."""
    validation_episodes: PositiveInt = 8
    """Held-out episodes of each round, in environments that training never uses."""
    num_envs: Episodes = 16
    """Environments stepped together."""
    min_length: NonNegativeInt = 0
    """Minimum steps of a teacher's trajectory; shorter ones are discarded."""
    rounds: NonNegativeInt = 0
    """DAgger rounds: the student plays, the teacher labels, and training continues."""
    round_episodes: PositiveInt = 16
    """Training episodes that the student plays in each round."""
    round_steps: PositiveInt | None = None
    """Steps of each of these episodes per round; the next round continues the same
    games, so that all phases of a long game are covered. A resumed run begins new
    games. With None each round has new, whole episodes."""
    rollout_env: dict[str, Any] = field(default_factory=dict)
    """Options of the environment to override while the student plays."""
    first_round: PositiveInt = 2000
    """Batches before the first round in which the student plays."""
    round_every: PositiveInt = 500
    """Batches from one round to the next."""
    batch_size: Examples = 128
    """Sequences of a batch: whole trajectories (or chunks) of a recurrent student,
    single steps otherwise."""
    truncate: PositiveInt | None = None
    """Steps of backpropagation through time, or None for the whole sequence."""
    chunk_length: PositiveInt | None = None
    """Steps of the chunks into which trajectories are cut for a recurrent student, each
    with a fresh memory, or None for whole trajectories."""
    burn_in: NonNegativeInt = 0
    """First steps of a chunk to exclude from the loss, because the memory has yet to
    warm up; chunks that begin an episode have none."""
    soft: bool = False
    """Learn the teacher's action probabilities, not only its choice."""
    margin_weighting: PositiveFloat | None = None
    """Weight steps by the margin between the teacher's best and worst logit: from 0.1
    at margin 0 to 1.1 at this margin and above. With None all steps have weight 1."""
    expected_regret: NonNegativeFloat = 0.0
    """Weight of the expected-regret loss: the margin between the teacher's best logit
    and the logit of the student's choice, in expectation over these choices."""
    auxiliary: NonNegativeFloat = 0.0
    """Weight of the auxiliary head's squared error: it predicts the teacher's
    privileged targets from the student's last hidden layer. 0: no auxiliary head."""
    lr: LearningRate = 1e-3
    """Learning rate of Adam at the start."""
    lr_end: NonNegativeFloat = 1e-5
    """Learning rate of the last batch, to which it falls along a cosine."""
    grad_clip: PositiveFloat | None = 1.0
    """Maximum global norm of the gradient, or None for no limit."""
    bfloat16: bool = False
    """Use torch's automatic mixed precision with bfloat16."""
    prev_action_noise: NonNegativeFloat = 0.0
    """Noise on the previous action. Box: standard deviation of Gaussian noise, also on
    the zeros at an episode's start. Choices: probability of replacement by a random
    option, except at an episode's start, where there is no previous action."""
    iteration_batches: PositiveInt = 100
    """Batches of an iteration: one row of metrics, one validation."""
    validation_steps: PositiveInt = 4096
    """Maximum validation steps, evenly spread, to measure a student without memory."""
    select: Literal["loss", "return"] = "loss"
    """Criterion of the best checkpoint: lowest loss on the validation trajectories of
    the last round, or highest return."""
    play_every: NonNegativeInt = 0
    """Iterations between measurements of the return; 0: none."""
    play_episodes: PositiveInt = 8
    """Episodes of such a measurement, in environments that training never uses."""

    def __post_init__(self) -> None:
        if self.select == "return" and not self.play_every:
            raise InputError(
                "clone.play_every: expected at least 1 with clone.select=return, got 0"
            )
        lengths = (self.chunk_length, self.round_steps)
        if self.burn_in and any(n and self.burn_in >= n for n in lengths):
            raise InputError(
                "clone.burn_in: expected fewer steps than clone.chunk_length = "
                f"{self.chunk_length} and clone.round_steps = {self.round_steps}, "
                f"got {self.burn_in}"
            )
        if self.lr_end > self.lr:
            raise InputError(
                f"clone.lr_end: expected at most clone.lr = {self.lr}, "
                f"got {self.lr_end}"
            )

    def round_start(self, number: int) -> int:
        """Count the batches before round ``number``; in round 0 the teacher plays."""
        return self.first_round + (number - 1) * self.round_every if number else 0

    def lr_at(self, batch: int, total: int) -> float:
        """Return the learning rate of a batch, by its number out of ``total``."""
        fraction = 1 - min(batch / max(total - 1, 1), 1.0)
        fraction = (1 - math.cos(math.pi * fraction)) / 2
        return self.lr_end + (self.lr - self.lr_end) * fraction


@dataclass(frozen=True)
class CloneRunSettings(EpisodeRunConfig):
    """Settings of the run itself, not of one of its parts."""

    teacher: str | None = None
    """Teacher: heuristic, a registered teacher such as value_table (Pong only),
    package.module:Class of a policy, the folder of a run or policy, pretrained=NAME or
    hf://…. Required."""
    fixed: dict[str, str] | None = None
    """Group that is not cloned → heuristic, random, package.module:Class of a
    policy, the folder of a policy or run, pretrained=NAME or hf://…. None if there is
    only one group."""
    plugins: list[PlugIn] = field(default_factory=list)
    """``package.module:Class`` names that these folders may use."""
    total_batches: PositiveInt = 5000
    """Batches of all rounds together."""


@dataclass(frozen=True, kw_only=True)
class CloneConfig(CloneRunSettings):
    """Configuration of a cloning run."""

    verb = "clone"
    env: Options
    policy: Options
    clone: CloneSettings
    perturbation: Options
