"""Dataset of a cloning run: the trajectories of all rounds, collected or read."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.description import describe_env
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent
from marl_pool.training.cloning.collect import ContinuedGames, Roles, collect
from marl_pool.training.cloning.learner import Loss
from marl_pool.training.cloning.recorder import RowTable
from marl_pool.training.cloning.sampler import PLAY, Augmentation
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.cloning.storage import (
    Round,
    load_round,
    read_about,
    round_path,
    rounds_in,
    save_round,
)
from marl_pool.training.cloning.trajectories import Trajectories, join
from marl_pool.training.cloning.validation import logits_option
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress
from marl_pool.utils.randomness import VALIDATION_ENVS

FOLDER = "trajectories"
IGNORED_OPTIONS = ("threads",)
"""Options of an environment that do not affect its dynamics."""


class CloneDataset:
    """Aggregated trajectories of a run's rounds.

    Args:
        config: configuration of the run.
        roles: roles of the groups.
        folder: folder of the run's trajectories.
        augmentation: source of the perturbation of the student's observations.

    Attributes:
        rows: table of distinct features; None unless features are uint8.
        target_names: names of the privileged targets of each step; () without any.
        train: training trajectories of all rounds so far.
        validation: held-out trajectories of all rounds so far.
    """

    def __init__(
        self,
        config: CloneConfig,
        roles: Roles,
        folder: Path,
        augmentation: Augmentation,
    ) -> None:
        self.config, self.settings, self.roles = config, config.clone, roles
        self.folder, self.augmentation = folder, augmentation
        group = describe_env(config.env).groups[roles.group]
        about = {
            "group": roles.group,
            "spec": group.tokens.to_json(),
            "actions": ActionSpec.of(group.action_space).to_json(),
            "env": config.env,
            "teacher": None if roles.teacher is None else roles.teacher.identity,
        }
        self.about: dict[str, Any] = json.loads(json.dumps(about))
        bytes_ = group.tokens.dtype == "uint8"
        self.rows = RowTable(group.tokens.num_features) if bytes_ else None
        self.target_names = self._target_names()
        self.train: Trajectories | None = None
        self.validation: Trajectories | None = None
        self._games: dict[str, ContinuedGames] = {}
        self._check_student_env()

    def _target_names(self) -> tuple[str, ...]:
        """Return the names in the given trajectories or, without any, the teacher's."""
        if self.config.trajectories is not None:
            return _target_names_of(self._given_paths()[0])
        return () if self.roles.teacher is None else self.roles.teacher.target_names

    def _check_student_env(self) -> None:
        """Validate that ``rollout_env`` changes neither tokens nor actions."""
        if not self.settings.rollout_env:
            return
        try:
            changed = {**self.config.env, **self.settings.rollout_env}
            group = describe_env(changed).groups.get(self.roles.group)
            own = describe_env(self.config.env).groups[self.roles.group]
            if group != own:
                raise InputError(
                    "expected options that change neither tokens nor actions"
                )
        except InputError as error:
            raise InputError(f"clone.rollout_env: {error}") from error

    def make_env(self, count: int, first: int, student: bool = False) -> BatchedEnv:
        """Make the environments ``first`` to ``first + count - 1``.

        Args:
            count: number of environments.
            first: number of the first one.
            student: apply ``rollout_env``, for play by the student.
        """
        options = dict(self.config.env)
        if student:
            options |= self.settings.rollout_env
        return make_batched_env(
            num_envs=count,
            seed=self.config.seed,
            first_env=first,
            device=self.config.device,
            **options,
        )

    def perturbation(self, first: int) -> Perturbation | None:
        """Build the perturbation of the environments from number ``first`` on."""
        return self.augmentation.at(first, PLAY)

    def add(self, number: int, student: Agent, learned: int | None) -> None:
        """Add the trajectories of a round: read them, or collect and save them.

        Args:
            number: number of the round; the teacher plays in round 0.
            student: policy that plays in the later rounds.
            learned: batches that it has learned from so far. Trajectories saved after
                another number of batches are collected again. None: the round began
                before the run was resumed, so read what was saved.

        Raises:
            InputError: trajectories of another environment or teacher, damaged
                trajectories, or none that is long or good enough.
        """
        path = round_path(self.folder, number)
        if not number and self.config.trajectories is not None:
            rounds = self._given(self._given_paths())
        elif path.is_dir() and learned in (None, read_about(path).get("learned")):
            rounds = [load_round(path, self.rows)]
        else:
            rounds = [self._collect(number, student, learned or 0)]
            save_round(path, rounds[0], self.rows)
        earlier = [] if self.train is None else [self.train]
        self.train = join([*earlier, *(each.train for each in rounds)])
        earlier = [] if self.validation is None else [self.validation]
        self.validation = join([*earlier, *(each.validation for each in rounds)])

    def _given_paths(self) -> list[Path]:
        """List the folders of an earlier run's rounds."""
        path = Path(self.config.trajectories or "")
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        found = rounds_in(folder)
        if not found:
            raise InputError(
                "trajectories: expected the folder of a cloning run, or of its "
                f"trajectories, got {path} without any"
            )
        return found

    def _validate_targets(self, found: list[Path]) -> None:
        """Reject past and future rounds with different privileged targets."""
        named = {str(path): _target_names_of(path) for path in found}
        if self.settings.rounds and self.roles.teacher is not None:
            teacher = self.roles.teacher
            named[str(teacher.identity)] = teacher.target_names
        for source, names in named.items():
            if self.settings.auxiliary and names != self.target_names:
                raise InputError(
                    f"clone.auxiliary: expected 0, got {self.settings.auxiliary:g}: "
                    f"expected the privileged targets {', '.join(self.target_names)}, "
                    f"got {', '.join(names) or 'none'} from {source}"
                )

    def _given(self, found: list[Path]) -> list[Round]:
        """Read the rounds of an earlier run."""
        path = self.config.trajectories
        for each in found:
            self._validate_origin(each)
        teachers = {str(read_about(each).get("teacher")) for each in found}
        if len(teachers) > 1:
            raise InputError(
                f"trajectories: expected rounds of one teacher in {path}, got "
                f"{', '.join(sorted(teachers))}"
            )
        rounds = [load_round(each, self.rows) for each in found]
        settings = self.settings
        loss = Loss(settings.soft, settings.margin_weighting, settings.expected_regret)
        if loss.needs_logits and any(
            "logits" not in part.train.steps for part in rounds
        ):
            raise InputError(
                f"{logits_option(settings)}: {path} holds no logits of the teacher"
            )
        self._validate_targets(found)
        count = sum(len(part.train) for part in rounds)
        if not count or not any(len(part.validation) for part in rounds):
            raise InputError(
                f"trajectories: expected training and validation trajectories in {path}"
                ", got none of one kind"
            )
        steps = sum(part.train.num_steps for part in rounds)
        print(f"{path}: {count} trajectories, {steps:,} steps", file=sys.stderr)
        return rounds

    def _validate_origin(self, path: Path) -> None:
        """Reject a round of another environment or teacher."""
        found, wanted = read_about(path), dict(self.about)
        if wanted["teacher"] is None:
            del wanted["teacher"]
        for each in (found, wanted):
            env = each.pop("env", {})
            options = {k: v for k, v in env.items() if k not in IGNORED_OPTIONS}
            each |= {f"env.{key}": value for key, value in options.items()}
        for key, value in wanted.items():
            if found.get(key) != value:
                raise InputError(
                    f"trajectories: {path}: expected {key} = {value}, "
                    f"got {found.get(key)}"
                )

    def _collect(self, number: int, student: Agent, learned: int) -> Round:
        settings = self.settings
        episodes = settings.round_episodes if number else settings.episodes
        first = settings.episodes + (number - 1) * episodes if number else 0
        played = {
            name: self._play(number, student, start, count, name)
            for name, start, count in (
                ("validation", VALIDATION_ENVS, settings.validation_episodes),
                ("train", first, episodes),
            )
        }
        kept = played if number else {k: self._good(v) for k, v in played.items()}
        validation = kept["validation"].without_duplicates()
        known = [*validation.digests]
        known += () if self.validation is None else self.validation.digests
        known += () if self.train is None else self.train.digests
        train = kept["train"].without_duplicates(known)
        if not len(train) and not number:
            raise InputError(
                f"env: all {len(kept['train'])} training trajectories are validation "
                "trajectories, too: expected an environment with more initial states, "
                "or fewer clone.validation_episodes"
            )
        about = {
            **self.about,
            "round": number,
            "learned": learned,
            "privileged_targets": list(self.target_names),
            "rollout_env": settings.rollout_env if number else {},
            "played": {name: len(part) for name, part in played.items()},
            "mean_return": float(played["train"].returns.mean()),
        }
        self._report(number, about, train, validation)
        return Round(train, validation, about)

    def _play(
        self, number: int, student: Agent, first: int, episodes: int, name: str
    ) -> Trajectories:
        settings, is_student = self.settings, number > 0
        if is_student and settings.round_steps is not None:
            if name not in self._games:
                self._games[name] = ContinuedGames(
                    self.roles,
                    self.make_env(episodes, first, student=True),
                    self.rows,
                    student,
                    self.perturbation(first),
                )
            return self._games[name].play(settings.round_steps, settings.beta**number)
        with Progress(episodes, unit=f"{name} episodes") as progress:
            return collect(
                self.roles,
                lambda count, start: self.make_env(count, start, is_student),
                first,
                episodes,
                num_envs=settings.num_envs,
                rows=self.rows,
                student=student if is_student else None,
                perturbation=self.perturbation if is_student else None,
                beta=settings.beta**number,
                noise=0.0 if is_student else settings.noise,
                progress=progress,
            )

    def _good(self, played: Trajectories) -> Trajectories:
        """Keep trajectories with ``min_length`` steps and ``min_return``."""
        settings = self.settings
        long = played.lengths >= settings.min_length
        if not long.any():
            raise InputError(
                f"clone.min_length: none of {len(played)} trajectories has "
                f"{settings.min_length} steps; the longest has {played.lengths.max()}"
            )
        least = -torch.inf if settings.min_return is None else settings.min_return
        good = long & (played.returns >= least)
        if not good.any():
            raise InputError(
                f"clone.min_return: none of {int(long.sum())} trajectories returns "
                f"{least}; the best returns {float(played.returns[long].max()):g}"
            )
        return played.keep(good)

    def _report(
        self,
        number: int,
        about: Mapping[str, Any],
        train: Trajectories,
        validation: Trajectories,
    ) -> None:
        print(
            f"round {number}: {len(train)} trajectories to learn from, "
            f"{train.num_steps:,} steps; {len(validation)} for validation; "
            f"mean return {about['mean_return']:.2f}",
            file=sys.stderr,
        )


def _target_names_of(path: Path) -> tuple[str, ...]:
    """Read the names of the privileged targets in a round's trajectories."""
    return tuple(read_about(path).get("privileged_targets", ()))
