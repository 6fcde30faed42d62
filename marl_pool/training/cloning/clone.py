"""The driver: collect, learn, let the student play, log, checkpoint, stop."""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from marl_pool.atomic import new_file, new_folder
from marl_pool.envs import make_batched_env
from marl_pool.errors import InputError
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies, save_policy
from marl_pool.progress import Progress
from marl_pool.rollout import Rollout
from marl_pool.runs import PARTS, Best, Run, iteration_of
from marl_pool.training.cloning.batches import Sampler
from marl_pool.training.cloning.casting import has_memory, make_cast, make_student
from marl_pool.training.cloning.collect import PLAY_WORLDS
from marl_pool.training.cloning.fitting import (
    check_fit_together,
    disturbance_of,
    logits_option,
)
from marl_pool.training.cloning.learner import NOTHING, Learner, Loss, Score
from marl_pool.training.cloning.reader import AuxiliaryHead
from marl_pool.training.cloning.rounds import FOLDER, Rounds
from marl_pool.training.cloning.saving import load_learner, save_learner
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.training.cloning.teacher import PolicyTeacher
from marl_pool.training.fixed import frozen_module, with_absolute_folders
from marl_pool.training.interrupt import Interruptible
from marl_pool.training.stopping import (
    checkpoint_to_resume,
    reading,
    stopped,
    trim_log,
    writing,
)

PROGRESS, TEACHER = "progress.json", "teacher"
COUNTS = ("round", "batch", "samples", "seconds", "best_round")
"""What the driver counts, and a checkpoint holds."""


def clone(
    run: Run,
    config: Mapping[str, Any],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Clone until all batches are learned or the seconds are used up.

    It goes on from the last checkpoint, if there is one.

    Args:
        run: takes trajectories, metrics, checkpoints and the best policy.
        config: composed and checked, as in ``run.config``.
        should_stop: asked before each iteration; True saves the run and ends it.

    Raises:
        InputError: parts of the configuration that don't fit each other, a teacher
            that cannot play, no trajectories.
        StoppedError: the loss was not finite, or the disk is full; the last good
            checkpoint stays.
    """
    torch.set_num_threads(config["threads"])
    config = _with_absolute_folders(config)
    driver = Driver(run, config, should_stop)
    if config != run.config:
        run.write_config(config)
    driver.loop()


class Driver:
    """One process's cloning of one run.

    Args:
        run: takes the results.
        config: of the run.
        should_stop: see `clone`.

    Raises:
        InputError: parts of the configuration that don't fit each other.
    """

    def __init__(
        self, run: Run, config: Mapping[str, Any], should_stop: Callable[[], bool]
    ) -> None:
        self.run, self.config, self.should_stop = run, config, should_stop
        self.settings = settings = CloneSettings(**config["clone"])
        check_fit_together(config, settings)
        world = make_batched_env(num_envs=1, seed=config["seed"], **config["env"])
        latest = checkpoint_to_resume(run)
        saved = latest and latest / "policy"
        self.cast = make_cast(config, world, run.path / TEACHER, saved)
        teacher = self.cast.teacher
        self.loss = Loss(
            settings.soft, settings.margin_weighting, settings.expected_regret
        )
        if self.loss.needs_logits and teacher is not None and not teacher.has_logits:
            raise InputError(
                f"{logits_option(settings)}: the teacher {config['teacher']} has no "
                "logits"
            )
        group = world.groups[self.cast.group]
        self.student = make_student(config, group)
        self.whole = has_memory(self.student, group.tokens.num_tokens)
        if settings.piece is not None and not self.whole:
            raise InputError(
                "clone.piece: expected null for a student without a memory, which "
                f"learns from single steps, got {settings.piece}"
            )
        self.disturbance = disturbance_of(config, settings, group.tokens)
        folder = run.path / FOLDER
        self.rounds = Rounds(config, settings, self.cast, folder, self.disturbance)
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
        self.round = self.batch = self.iteration = self.samples = 0
        self.seconds, self.best_round = 0.0, -1
        self.played, self.played_at = math.nan, -1
        self.validation_loss = math.inf
        self.ctrl_c = Interruptible()

    def _auxiliary_head(self) -> AuxiliaryHead | None:
        """Build the head for the teacher's privileged targets, if the config asks."""
        if not self.settings.auxiliary:
            return None
        width, names = self.student.hidden_dim, self.rounds.target_names
        if not width:
            raise InputError(
                "clone.auxiliary: expected 0 for a student that shows no hidden layer, "
                f"such as policy {self.config['policy']['name']}, got "
                f"{self.settings.auxiliary:g}"
            )
        if not names:
            source = self.config["teacher"] or self.config["trajectories"]
            raise InputError(
                f"clone.auxiliary: expected 0, since {source} has no privileged "
                f"targets, got {self.settings.auxiliary:g}"
            )
        head = AuxiliaryHead(width, len(names), self.config["seed"])
        return head.to(self.config["device"])

    def loop(self) -> None:
        """Collect and learn, round by round; see `clone`."""
        self._resume()
        began = time.monotonic()
        for number in range(self.settings.rounds + 1):
            begun = number <= self.round
            with self._writing("the trajectories"):
                learned = None if begun else self.batch
                self.rounds.add(number, self.student.eval(), learned)
            self.round = max(self.round, number)
            self._keep_teacher()
            end = self._end(number)
            if self.batch >= end:
                continue
            self._learn_round(end, began)
            self._save()
            if self.ctrl_c.asked:
                raise KeyboardInterrupt
            if self._must_stop(began):
                return

    def _keep_teacher(self) -> None:
        """Copy the teacher into the run: its folder may move, or hold another."""
        teacher, folder = self.cast.teacher, self.run.path / TEACHER
        if not isinstance(teacher, PolicyTeacher) or folder.is_dir():
            return
        if isinstance(teacher.policy, SpecifiedPolicy):
            with self._writing("the teacher"), new_folder(folder) as new:
                save_policy(teacher.policy, new)

    def _end(self, number: int) -> int:
        """Batches after which the round ends."""
        if number == self.settings.rounds:
            return int(self.config["total_batches"])
        return self.settings.start(number + 1)

    def _must_stop(self, began: float) -> bool:
        limit = self.config["time_limit"]
        late = limit is not None and time.monotonic() - began >= limit
        return late or self.ctrl_c.asked or self.should_stop()

    def _learn_round(self, end: int, began: float) -> None:
        train, validation = self._samplers()
        total, limit = self.config["total_batches"], self.config["time_limit"]
        left = None if limit is None else limit - (time.monotonic() - began)
        with (
            Progress(
                total, unit="batches", done=self.batch, time_limit=left
            ) as progress,
            self.ctrl_c,
        ):
            while self.batch < end and not self._must_stop(began):
                row = self._iterate(train, validation, end)
                numbers = ("samples_per_second", "loss", "validation_loss")
                progress.update(
                    self.batch,
                    **{name: row[name] for name in numbers},
                    return_mean=self.played,
                )

    def _samplers(self) -> list[Sampler]:
        """Of the trajectories to learn from, and of those for validation."""
        rows = self.rounds.rows
        table = None if rows is None else rows.table()
        return [
            Sampler(
                part,
                table,
                self.student.actions,
                self.disturbance,
                size=self.settings.batch_size,
                whole=self.whole,
                piece=self.settings.piece,
                burn_in=self.settings.burn_in,
            )
            for part in (self.rounds.train, self.rounds.validation)
            if part is not None
        ]

    def _iterate(
        self, train: Sampler, validation: Sampler, end: int
    ) -> dict[str, float]:
        """Learn some batches, measure, log; return the row of metrics."""
        began, every = time.monotonic(), self.settings.play_every
        score = self._learn(train, end)
        learn_seconds = time.monotonic() - began
        measured = self._measure(validation)
        if every and self.iteration % every == 0:
            self._play()
        self.seconds += time.monotonic() - began
        played = self.played if self.played_at == self.iteration else math.nan
        row = {
            "iteration": self.iteration,
            "round": self.round,
            "batches": self.batch,
            "samples": self.samples,
            "seconds": self.seconds,
            **self._scores("", score),
            **self._scores("validation_", measured),
            "return_mean": played,
            "lr": self.lr(self.batch - 1),
            "gradient_norm": float(self.learner.gradient_norm),
            "trajectories": len(train.trajectories),
            "trajectory_steps": train.trajectories.num_steps,
            "learn_seconds": learn_seconds,
            "samples_per_second": score.steps / learn_seconds,
        }
        with self._writing("metrics.csv"):
            self.run.log(row)
        if self.iteration % self.config["checkpoint"]["every"] == 0:
            self._save()
        return row

    def _learn(self, train: Sampler, end: int) -> Score:
        """An iteration's batches, none beyond ``end``."""
        first, score = self.settings.start(self.round), NOTHING
        for _ in range(min(self.settings.iteration_batches, end - self.batch)):
            batch = train.batch(self.batch - first, self.batch)
            batch = batch.to(self.config["device"])
            score = score.plus(self.learner.learn(batch, self.lr(self.batch)))
            self.batch += 1
        self.iteration, self.samples = self.iteration + 1, self.samples + score.steps
        if not math.isfinite(float(score.loss)):
            where = f"iteration {self.iteration}"
            raise stopped(self.run, where, "the loss is not finite")
        return score

    def _measure(self, validation: Sampler) -> Score:
        measured = NOTHING
        for batch in validation.all(self.settings.validation_steps):
            here = batch.to(self.config["device"])
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
        """The learning rate of a batch, by its number."""
        settings = self.settings
        if settings.decay == "constant":
            return settings.lr
        left = 1 - min(batch / max(self.config["total_batches"] - 1, 1), 1.0)
        if settings.decay == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return settings.lr_end + (settings.lr - settings.lr_end) * left

    def _play(self) -> float:
        """Measure the student's return in worlds of its own."""
        if self.played_at == self.iteration:
            return self.played
        count = self.settings.play_episodes
        rollout = Rollout(
            self.rounds.world(count, PLAY_WORLDS, student=True),
            {**self.cast.others, self.cast.group: self.student.eval()},
            perturbation=self.rounds.perturbation(PLAY_WORLDS),
        )
        returns = rollout.episodes().returns[self.cast.group]
        self.played, self.played_at = float(returns.mean()), self.iteration
        return self.played

    def _save(self) -> None:
        """Checkpoint; the best one's policy becomes the run's."""
        if self.iteration == self.run.iterations_saved:
            return
        by_return = self.settings.select == "return"
        score = self._play() if by_return else -self.validation_loss
        best = self.run.best
        # A later round's validation trajectories are others, and harder.
        newer = not by_return and self.round > self.best_round
        better = best is None or newer or score > best.score
        self.best_round = self.round if better else self.best_round
        with self._writing("the checkpoint"):
            with self.run.checkpoint(self.iteration, PARTS["clone"]) as folder:
                self._write_checkpoint(folder)
            if better:
                best = Best(self.iteration, score)
                with self.run.save_policy_dir(best) as folder:
                    self._save_policy(folder)
            self.run.prune(self.config["checkpoint"]["keep"])

    def _write_checkpoint(self, folder: Path) -> None:
        self._save_policy(folder / "policy")
        save_learner(self.learner, folder)
        counts = {name: getattr(self, name) for name in COUNTS}
        with new_file(folder / PROGRESS) as out:
            json.dump(counts, out)

    def _save_policy(self, folder: Path) -> None:
        group = self.cast.group
        modules: dict[str, SpecifiedPolicy] = {group: self.student}
        groups = {group: group}
        for name, policy in self.cast.others.items():
            if isinstance(policy, SpecifiedPolicy):
                groups[name] = frozen_module(name)
                modules[groups[name]] = policy
        save_policies(modules, groups, folder)

    def _resume(self) -> None:
        checkpoint = self.run.latest_checkpoint()
        if checkpoint is not None:
            with reading(self.run, checkpoint):
                counts = json.loads((checkpoint / PROGRESS).read_text())
                load_learner(self.learner, checkpoint)
                for name in COUNTS:
                    setattr(self, name, counts[name])
            self.iteration = iteration_of(checkpoint)
        with self._writing("metrics.csv"):
            trim_log(self.run, self.iteration)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(self.run, f"iteration {self.iteration}", what)


def _with_absolute_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn folders into absolute paths: a run may be resumed from elsewhere."""
    found = {**config, "fixed": with_absolute_folders(config["fixed"])}
    for key in ("teacher", "trajectories"):
        folder = config[key] and Path(config[key]).expanduser()
        if folder and folder.is_dir():
            found[key] = str(folder.absolute())
    return found
