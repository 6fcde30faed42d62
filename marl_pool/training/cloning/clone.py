"""Cloning, one iteration at a time: collect, learn, let the student play."""

import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch.utils._pytree import tree_leaves
from typing_extensions import override

from marl_pool.envs.description import describe_env
from marl_pool.files.atomic import new_folder, write_json
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.actions import changes_actions
from marl_pool.perturbations.base import validate_no_ramp
from marl_pool.policies.base import SequencePolicy, SpecifiedPolicy
from marl_pool.policies.storage import save_policies, save_policy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import LOSS, RETURN, Run, iteration_of
from marl_pool.training.cloning.dataset import FOLDER, CloneDataset
from marl_pool.training.cloning.learner import (
    ZERO_SCORE,
    Learner,
    Score,
    make_auxiliary_head,
    make_student,
)
from marl_pool.training.cloning.sampler import Augmentation, Sampler
from marl_pool.training.cloning.settings import CloneConfig, CloneSettings
from marl_pool.training.cloning.teacher import PolicyTeacher, build_roles
from marl_pool.training.errors import StepError, writing
from marl_pool.training.fixed_policies import frozen_module
from marl_pool.training.jobs import with_absolute_folders
from marl_pool.training.loop import Iteration, TrainingLoop, TrainingMethod, never
from marl_pool.utils.devices import checked_device
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import VALIDATION_ENVS

PROGRESS, TEACHER = "progress.json", "teacher"
PLAY_ENV_IDS = VALIDATION_ENVS + (1 << 39)
"""First environment number of measurements of the return during training."""
COUNTS = ("round", "batch", "samples", "seconds", "best_round")
"""Attributes of `CloningMethod` that a checkpoint stores."""


def clone(
    run: Run, config: CloneConfig, should_stop: Callable[[], bool] = never
) -> None:
    """Clone a teacher until the last batch or the time limit.

    The run receives trajectories, metrics, checkpoints and the best policy; with a
    checkpoint, it continues from there. See `Job.function` for the arguments.

    Raises:
        InputError: incompatible parts of the configuration, a teacher that cannot act
            in the environment, or no trajectories to learn from.
        StoppedError: the loss was not finite, or the disk is full; the last good
            checkpoint remains.
    """
    config = with_absolute_folders(config)
    TrainingLoop(run, config, should_stop).train(
        lambda checkpoint: CloningMethod(run, config, checkpoint)
    )


def _validate(config: CloneConfig) -> None:
    """Validate what no single section of the configuration can check."""
    settings, perturbation = config.clone, config.perturbation
    checked_device(config.device)
    # The last round needs at least one batch.
    last = settings.round_start(settings.rounds)
    if config.total_batches <= last:
        raise InputError(
            f"total_batches: expected more than {last}, where the last of "
            f"clone.rounds = {settings.rounds} begins, got {config.total_batches}"
        )
    if config.teacher is None:
        raise InputError("teacher: expected a policy to clone, got null")
    if perturbation.name != "none" and changes_actions(perturbation.name):
        fitting = [name for name in PERTURBATIONS if not changes_actions(name)]
        raise InputError(
            f"perturbation: expected a perturbation of tokens ({', '.join(fitting)}), "
            f"since learning from samples executes no actions, got {perturbation.name}"
        )
    validate_no_ramp(perturbation, "samples are learned from in any order")
    for key in ("onset", "end", "agents", "groups"):
        if value := perturbation.get(key):
            raise InputError(
                f"perturbation.{key}: expected the default, since samples are learned "
                f"from in any order, got {value}"
            )
    severity = perturbation.get("severity", 0.0)
    # A list is a range of severities; check its upper end.
    largest = severity[-1] if isinstance(severity, list) else severity
    if perturbation.name == "occlude" and largest >= 1:
        raise InputError(
            "perturbation.severity: expected a fraction of hidden tokens in [0, 1), "
            f"got {largest:g}"
        )


def _validate_student(
    settings: CloneSettings, student: SequencePolicy, whole: bool
) -> None:
    """Reject settings without an effect on a student; ``whole`` means sequences."""
    of_sequences = {"truncate": "null", "chunk_length": "null", "burn_in": "0"}
    for key, default in of_sequences.items():
        if (value := getattr(settings, key)) and not whole:
            raise InputError(
                f"clone.{key}: expected {default} for a student without a memory, "
                f"which learns from single steps, got {value}"
            )
    if settings.prev_action_noise and not student.recurrent:
        raise InputError(
            "clone.prev_action_noise: expected 0 for a student that does not read its "
            f"previous action, got {settings.prev_action_noise}"
        )


class CloningMethod(TrainingMethod):
    r"""Dataset aggregation (DAgger): imitate a teacher on the student's own states.

    Round 0 is behavior cloning of the teacher's trajectories. In the later rounds the
    student plays, and the teacher labels every step. The student is trained on the
    trajectories of all rounds so far; see `losses` for the objective.

    Source: Ross, Gordon and Bagnell, A reduction of imitation learning and structured
    prediction to no-regret online learning (2011), https://arxiv.org/abs/1011.0686,
    in its parameter-free version, :math:`\beta_i = I(i = 0)`. Here training continues
    from the last weights instead of starting anew in each round.
    """

    unit = "batches"

    def __init__(self, run: Run, config: CloneConfig, checkpoint: Path | None) -> None:
        super().__init__(run, config.total_batches)
        self.config, self.settings = config, config.clone
        settings = config.clone
        _validate(config)
        # Build the teacher and the fixed policies, from the checkpoint if there is one.
        groups = describe_env(config.env).groups
        saved = checkpoint and checkpoint / "policy"
        self.roles = build_roles(config, groups, run.path / TEACHER, saved)
        # Some options need the teacher's logits, except with these values.
        teacher = self.roles.teacher
        plain = {"soft": "false", "margin_weighting": "null", "expected_regret": "0"}
        for key, value in plain.items():
            if getattr(settings, key) and not teacher.has_logits:
                raise InputError(
                    f"clone.{key}: expected {value}: the teacher {config.teacher} has "
                    "no logits"
                )
        # Build the student: a recurrent one learns from sequences, others from steps.
        group = groups[self.roles.group]
        self.student = make_student(config, group)
        if self.student.actions.selects and config.perturbation.name != "none":
            raise InputError(
                "perturbation: expected none where actions select tokens, since labels "
                f"number the unperturbed tokens, got {config.perturbation.name}"
            )
        memory = self.student.initial_memory(1, group.tokens.num_tokens)
        self.whole = bool(tree_leaves(memory))
        if checkpoint is None:  # earlier revisions have trained such students
            _validate_student(settings, self.student, self.whole)
        # Build the dataset and the learner; rounds fill the dataset later.
        self.augmentation = Augmentation(
            group.tokens, config.perturbation, settings, config.seed
        )
        self.augmentation.build()  # rejects options that do not fit
        folder = run.path / FOLDER
        self.dataset = CloneDataset(config, self.roles, folder, self.augmentation)
        head = make_auxiliary_head(config, self.student, teacher.target_names)
        self.learner = Learner(self.student, settings, head)
        # Count rounds, batches and samples; `restore` overwrites the counts.
        self.round = self.batch = self.iteration = self.samples = self.end = 0
        self.seconds, self.best_round = 0.0, -1
        self.played, self.played_at = math.nan, -1
        self.validation_loss = math.inf

    # Rounds

    @property
    @override
    def done(self) -> int:
        return self.batch

    @property
    @override
    def round_is_over(self) -> bool:
        return self.batch >= self.end

    @override
    def rounds(self) -> Iterator[None]:
        for number in range(self.settings.rounds + 1):
            # Collect the round's trajectories, or read them if the run is resumed.
            is_begun = number <= self.round
            learned = None if is_begun else self.batch
            with writing(self.run, self.where(self.iteration), "the trajectories"):
                self.dataset.add(number, self.student.eval(), learned)
            self.round = max(self.round, number)
            self._keep_teacher()
            # Train on the trajectories of this round and all earlier ones.
            last = number == self.settings.rounds
            self.end = self.total if last else self.settings.round_start(number + 1)
            if not self.round_is_over:
                sample = partial(
                    Sampler,
                    rows=self.dataset.rows,
                    actions=self.student.actions,
                    augmentation=self.augmentation,
                    whole=self.whole,
                )
                self.train = sample(self.dataset.splits["train"])
                self.validation = sample(self.dataset.splits["validation"])
                yield

    def _keep_teacher(self) -> None:
        """Copy the teacher into the run, because its folder may move or change."""
        teacher, folder = self.roles.teacher, self.run.path / TEACHER
        if not isinstance(teacher, PolicyTeacher) or folder.is_dir():
            return
        if isinstance(teacher.policy, SpecifiedPolicy):
            where = self.where(self.iteration)
            with writing(self.run, where, "the teacher"), new_folder(folder) as copy:
                save_policy(teacher.policy, copy)

    # Iterations

    @override
    def step(self, iteration: int) -> Iteration:
        began, every = time.monotonic(), self.settings.play_every
        self.iteration = iteration
        # Train for some batches, then measure the loss on held-out trajectories.
        score = self._learn()
        learn_seconds = time.monotonic() - began
        measured = self._measure()
        # Measure the student's return, which the loss predicts only roughly.
        played = self._play() if every and iteration % every == 0 else math.nan
        self.seconds += time.monotonic() - began
        row = {
            "round": self.round,
            "batches": self.batch,
            "samples": self.samples,
            "seconds": self.seconds,
            **self._means("", score),
            **self._means("validation_", measured),
            "return_mean": played,
            "lr": self.settings.lr_at(self.batch - 1, self.total),
            "gradient_norm": float(self.learner.gradient_norm),
            "trajectories": len(self.train.trajectories),
            "trajectory_steps": self.train.trajectories.num_steps,
            "learn_seconds": learn_seconds,
            "samples_per_second": score.steps / learn_seconds,
        }
        progress = {
            n: row[n] for n in ("samples_per_second", "loss", "validation_loss")
        }
        return Iteration(row, {**progress, "return_mean": self.played})

    def _learn(self) -> Score:
        """Train for one iteration, at most to the end of the round."""
        first, score = self.settings.round_start(self.round), ZERO_SCORE
        for _ in range(min(self.settings.iteration_batches, self.end - self.batch)):
            batch = self.train.batch(self.batch - first, self.batch)
            lr = self.settings.lr_at(self.batch, self.total)
            score = score.plus(self.learner.learn(batch.to(self.config.device), lr))
            self.batch += 1
        self.samples += score.steps
        if not math.isfinite(float(score.loss)):
            raise StepError("the loss is not finite")
        return score

    def _measure(self) -> Score:
        measured = ZERO_SCORE
        for batch in self.validation.all(self.settings.validation_steps):
            score = self.learner.measure(batch.to(self.config.device))
            measured = measured.plus(score)
        self.validation_loss = float(measured.loss) / measured.steps
        if not math.isfinite(self.validation_loss):
            raise StepError("the validation loss is not finite")
        return measured

    def _means(self, prefix: str, score: Score) -> dict[str, float]:
        """Return the means over steps, by prefixed name."""
        sums = {"loss": score.loss}
        if self.student.actions.discrete:
            sums["accuracy"] = score.right
        if self.learner.auxiliary_head is not None:
            sums["auxiliary_error"] = score.auxiliary_error
        return {f"{prefix}{name}": float(s) / score.steps for name, s in sums.items()}

    def _play(self) -> float:
        """Measure the student's return in environments that training never uses."""
        if self.played_at == self.iteration:
            return self.played
        count = self.settings.play_episodes
        rollout = Rollout(
            self.dataset.make_env(PLAY_ENV_IDS, count, student=True),
            {**self.roles.other_policies, self.roles.group: self.student.eval()},
            perturbation=self.augmentation.build(self.roles.group),
        )
        returns = rollout.episodes().means()[self.roles.group]
        self.played, self.played_at = float(returns.mean()), self.iteration
        return self.played

    # Checkpoints

    @property
    @override
    def score_of(self) -> str:
        return RETURN if self.settings.select == "return" else LOSS

    @override
    def score(self, iteration: int) -> float:
        by_return = self.settings.select == "return"
        return self._play() if by_return else -self.validation_loss

    @override
    def accept(self, score: float) -> bool:
        # Losses of different rounds are not comparable, because each round adds harder
        # validation trajectories: accept the first checkpoint of a new round.
        newer = self.settings.select == "loss" and self.round > self.best_round
        if better := newer or super().accept(score):
            self.best_round = self.round
        return better

    @override
    def save(self, checkpoint: Path) -> None:
        self.save_policy(checkpoint / "policy")
        self.learner.save(checkpoint)
        counts = {name: getattr(self, name) for name in COUNTS}
        write_json(checkpoint / PROGRESS, counts)

    @override
    def restore(self, checkpoint: Path) -> None:
        counts = json.loads((checkpoint / PROGRESS).read_text())
        self.learner.restore(checkpoint)
        for name in COUNTS:
            setattr(self, name, counts[name])
        self.iteration = iteration_of(checkpoint)

    @override
    def save_policy(self, folder: Path) -> None:
        group = self.roles.group
        modules: dict[str, SpecifiedPolicy] = {group: self.student}
        groups = {group: group}
        for name, policy in self.roles.other_policies.items():
            if isinstance(policy, SpecifiedPolicy):
                groups[name] = frozen_module(name)
                modules[groups[name]] = policy
        save_policies(modules, groups, folder)
