"""Cloning, one iteration at a time: collect, learn, let the student play."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typing_extensions import override

from marl_pool.envs.description import describe_env
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies, save_policy
from marl_pool.rollout import Rollout
from marl_pool.runs import Run, iteration_of
from marl_pool.training.cloning.auxiliary import AuxiliaryHead
from marl_pool.training.cloning.build import build_roles, has_memory, make_student
from marl_pool.training.cloning.checkpoint import load_learner, save_learner
from marl_pool.training.cloning.collect import PLAY_ENV_IDS
from marl_pool.training.cloning.dataset import FOLDER, CloneDataset
from marl_pool.training.cloning.learner import NOTHING, Learner, Loss, Score
from marl_pool.training.cloning.sampler import Sampler
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.cloning.teacher import PolicyTeacher
from marl_pool.training.cloning.validation import (
    check_fit_together,
    logits_option,
    make_augmentation,
)
from marl_pool.training.errors import StepError, writing
from marl_pool.training.fixed_policies import frozen_module, with_absolute_folders
from marl_pool.training.loop import Iteration, TrainingLoop, TrainingMethod, never
from marl_pool.utils.atomic import new_file, new_folder
from marl_pool.utils.errors import InputError

PROGRESS, TEACHER = "progress.json", "teacher"
COUNTS = ("round", "batch", "samples", "seconds", "best_round")
"""Attributes of `CloningMethod` that a checkpoint stores."""
SHOWN = ("samples_per_second", "loss", "validation_loss")
"""Metrics beside the progress bar."""


def clone(
    run: Run,
    config: Mapping[str, Any],
    should_stop: Callable[[], bool] = never,
) -> None:
    """Clone a teacher until the last batch or the time limit.

    A run that has a checkpoint continues from it.

    Args:
        run: receives trajectories, metrics, checkpoints and the best policy.
        config: composed and checked, as in ``run.config``.
        should_stop: called before each iteration; True saves the run and ends it.

    Raises:
        InputError: incompatible parts of the configuration, a teacher that cannot act
            in the environment, or no trajectories.
        StoppedError: the loss was not finite, or the disk is full; the last good
            checkpoint stays.
    """
    plain = _with_absolute_folders(config)
    typed = CloneConfig.from_plain(plain)
    TrainingLoop(run, typed, plain, should_stop).train(
        lambda checkpoint: CloningMethod(run, typed, checkpoint)
    )


class CloningMethod(TrainingMethod):
    r"""Dataset aggregation (DAgger): imitate a teacher on the student's own states.

    Round 0 is behaviour cloning of the teacher's trajectories. In round i the teacher
    takes a step with probability :math:`\beta^i` and the student otherwise, and the
    teacher labels every step. The student is trained on the trajectories of all rounds
    so far; see `losses` for the objective. The default :math:`\beta = 0` lets the
    student take all steps.

    Source: Ross, Gordon and Bagnell, A reduction of imitation learning and structured
    prediction to no-regret online learning (2011), https://arxiv.org/abs/1011.0686.
    Here training continues from the last weights, in place of a new fit each round.

    Args:
        run: receives the results.
        config: configuration of the run.
        checkpoint: checkpoint to resume from; None: start from the beginning.

    Raises:
        InputError: incompatible parts of the configuration.
    """

    unit = "batches"

    def __init__(self, run: Run, config: CloneConfig, checkpoint: Path | None) -> None:
        super().__init__(run, config.total_batches)
        self.config, self.settings = config, config.clone
        settings = config.clone
        check_fit_together(config)
        # Build the teacher and the fixed policies, from the checkpoint if there is one.
        groups = describe_env(config.env).groups
        saved = checkpoint and checkpoint / "policy"
        self.roles = build_roles(config, groups, run.path / TEACHER, saved)
        teacher = self.roles.teacher
        self.loss = Loss(
            settings.soft, settings.margin_weighting, settings.expected_regret
        )
        if self.loss.needs_logits and teacher is not None and not teacher.has_logits:
            raise InputError(
                f"{logits_option(settings)}: the teacher {config.teacher} has no logits"
            )
        # Build the student: a recurrent one learns from sequences, others from steps.
        group = groups[self.roles.group]
        self.student = make_student(config, group)
        self.whole = has_memory(self.student, group.tokens.num_tokens)
        if settings.chunk_length is not None and not self.whole:
            raise InputError(
                "clone.chunk_length: expected null for a student without a memory, "
                f"which learns from single steps, got {settings.chunk_length}"
            )
        self.augmentation = make_augmentation(config, group.tokens)
        # Build the dataset and the learner; rounds fill the dataset later.
        folder = run.path / FOLDER
        self.dataset = CloneDataset(config, self.roles, folder, self.augmentation)
        self.learner = Learner(
            self.student,
            lr=settings.lr,
            grad_clip=settings.grad_clip,
            truncate=settings.truncate,
            loss=self.loss,
            bfloat16=settings.bfloat16,
            auxiliary_head=self._auxiliary_head(),
            auxiliary=settings.auxiliary,
        )
        self.round = self.batch = self.iteration = self.samples = self.end = 0
        self.seconds, self.best_round = 0.0, -1
        self.played, self.played_at = math.nan, -1
        self.validation_loss = math.inf

    def _auxiliary_head(self) -> AuxiliaryHead | None:
        """Build the head for the teacher's privileged targets, if the config asks."""
        if not self.settings.auxiliary:
            return None
        width, names = self.student.hidden_dim, self.dataset.target_names
        if not width:
            raise InputError(
                f"clone.auxiliary: expected 0 with policy={self.config.policy['name']},"
                f" which exposes no hidden layer, got {self.settings.auxiliary:g}"
            )
        if not names:
            source = self.config.teacher or self.config.trajectories
            raise InputError(
                f"clone.auxiliary: expected 0, because {source} has no privileged "
                f"targets, got {self.settings.auxiliary:g}"
            )
        head = AuxiliaryHead(width, len(names), self.config.seed)
        return head.to(self.config.device)

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
            begun = number <= self.round
            with self._writing("the trajectories"):
                learned = None if begun else self.batch
                self.dataset.add(number, self.student.eval(), learned)
            self.round = max(self.round, number)
            self._keep_teacher()
            # Train on these trajectories and those of all earlier rounds.
            self.end = self._end(number)
            if not self.round_is_over:
                self.train, self.validation = self._samplers()
                yield

    def _keep_teacher(self) -> None:
        """Copy the teacher into the run, because its folder may move or change."""
        teacher, folder = self.roles.teacher, self.run.path / TEACHER
        if not isinstance(teacher, PolicyTeacher) or folder.is_dir():
            return
        if isinstance(teacher.policy, SpecifiedPolicy):
            with self._writing("the teacher"), new_folder(folder) as new:
                save_policy(teacher.policy, new)

    def _end(self, number: int) -> int:
        """Count the batches at the end of the round."""
        if number == self.settings.rounds:
            return self.config.total_batches
        return self.settings.round_start(number + 1)

    def _samplers(self) -> list[Sampler]:
        """Build samplers of training and of validation trajectories."""
        rows = self.dataset.rows
        table = None if rows is None else rows.table()
        return [
            Sampler(
                part,
                table,
                self.student.actions,
                self.augmentation,
                size=self.settings.batch_size,
                whole=self.whole,
                chunk_length=self.settings.chunk_length,
                burn_in=self.settings.burn_in,
            )
            for part in (self.dataset.train, self.dataset.validation)
            if part is not None
        ]

    # Iterations

    @override
    def step(self, iteration: int) -> Iteration:
        began, every = time.monotonic(), self.settings.play_every
        self.iteration = iteration
        # Train for some batches, then measure the loss on held-out trajectories.
        score = self._learn()
        learn_seconds = time.monotonic() - began
        measured = self._measure(self.validation)
        # Measure the student's return, which the loss predicts only roughly.
        if every and iteration % every == 0:
            self._play()
        self.seconds += time.monotonic() - began
        played = self.played if self.played_at == iteration else math.nan
        row = {
            "round": self.round,
            "batches": self.batch,
            "samples": self.samples,
            "seconds": self.seconds,
            **self._scores("", score),
            **self._scores("validation_", measured),
            "return_mean": played,
            "lr": self.lr(self.batch - 1),
            "gradient_norm": float(self.learner.gradient_norm),
            "trajectories": len(self.train.trajectories),
            "trajectory_steps": self.train.trajectories.num_steps,
            "learn_seconds": learn_seconds,
            "samples_per_second": score.steps / learn_seconds,
        }
        shown = {name: row[name] for name in SHOWN} | {"return_mean": self.played}
        return Iteration(row, shown)

    def _learn(self) -> Score:
        """Train for one iteration, at most to the end of the round."""
        first, score = self.settings.round_start(self.round), NOTHING
        for _ in range(min(self.settings.iteration_batches, self.end - self.batch)):
            batch = self.train.batch(self.batch - first, self.batch)
            batch = batch.to(self.config.device)
            score = score.plus(self.learner.learn(batch, self.lr(self.batch)))
            self.batch += 1
        self.samples += score.steps
        if not math.isfinite(float(score.loss)):
            raise StepError("the loss is not finite")
        return score

    def _measure(self, validation: Sampler) -> Score:
        measured = NOTHING
        for batch in validation.all(self.settings.validation_steps):
            here = batch.to(self.config.device)
            measured = measured.plus(self.learner.measure(here))
        self.validation_loss = float(measured.loss) / measured.steps
        return measured

    def _scores(self, prefix: str, score: Score) -> dict[str, float]:
        found = {f"{prefix}loss": float(score.loss) / score.steps}
        if self.student.actions.discrete:
            found[f"{prefix}accuracy"] = float(score.right) / score.steps
        if self.learner.auxiliary_head is not None:
            error = float(score.auxiliary_error) / score.steps
            found[f"{prefix}auxiliary_error"] = error
        return found

    def lr(self, batch: int) -> float:
        """Return the learning rate of a batch, by its number."""
        settings = self.settings
        if settings.decay == "constant":
            return settings.lr
        left = 1 - min(batch / max(self.config.total_batches - 1, 1), 1.0)
        if settings.decay == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return settings.lr_end + (settings.lr - settings.lr_end) * left

    def _play(self) -> float:
        """Measure the student's return in environments that training never uses."""
        if self.played_at == self.iteration:
            return self.played
        count = self.settings.play_episodes
        rollout = Rollout(
            self.dataset.make_env(count, PLAY_ENV_IDS, student=True),
            {**self.roles.others, self.roles.group: self.student.eval()},
            perturbation=self.dataset.perturbation(PLAY_ENV_IDS),
        )
        returns = rollout.episodes().returns[self.roles.group]
        self.played, self.played_at = float(returns.mean()), self.iteration
        return self.played

    # Checkpoints

    @override
    def score(self, iteration: int) -> float:
        by_return = self.settings.select == "return"
        return self._play() if by_return else -self.validation_loss

    @override
    def accept(self, score: float) -> bool:
        # Losses of different rounds are not comparable: each round adds harder
        # validation trajectories. Accept the first checkpoint of a new round.
        by_loss = self.settings.select == "loss"
        newer = by_loss and self.round > self.best_round
        if better := newer or super().accept(score):
            self.best_round = self.round
        return better

    @override
    def save(self, checkpoint: Path) -> None:
        self.save_policy(checkpoint / "policy")
        save_learner(self.learner, checkpoint)
        counts = {name: getattr(self, name) for name in COUNTS}
        with new_file(checkpoint / PROGRESS) as out:
            json.dump(counts, out)

    @override
    def restore(self, checkpoint: Path) -> None:
        counts = json.loads((checkpoint / PROGRESS).read_text())
        load_learner(self.learner, checkpoint)
        for name in COUNTS:
            setattr(self, name, counts[name])
        self.iteration = iteration_of(checkpoint)

    @override
    def save_policy(self, folder: Path) -> None:
        group = self.roles.group
        modules: dict[str, SpecifiedPolicy] = {group: self.student}
        groups = {group: group}
        for name, policy in self.roles.others.items():
            if isinstance(policy, SpecifiedPolicy):
                groups[name] = frozen_module(name)
                modules[groups[name]] = policy
        save_policies(modules, groups, folder)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(self.run, self.where(self.iteration), what)


def _with_absolute_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make folders absolute, because a run may be resumed from another directory."""
    found = {**config, "fixed": with_absolute_folders(config["fixed"])}
    for key in ("teacher", "trajectories"):
        folder = config[key] and Path(config[key]).expanduser()
        if folder and folder.is_dir():
            found[key] = str(folder.absolute())
    return found
