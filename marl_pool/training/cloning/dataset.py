"""Each round's trajectories: collected, or read where they were collected before."""

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
from marl_pool.training.cloning.collect import Games, Roles, collect
from marl_pool.training.cloning.learner import Loss
from marl_pool.training.cloning.recorder import Rows
from marl_pool.training.cloning.sampler import PLAY, Disturbance
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
from marl_pool.utils.randomness import VALIDATION_WORLDS

FOLDER = "trajectories"
NO_MATTER = ("threads",)
"""Options of an env that change nothing that happens in it."""


class Rounds:
    """The trajectories of a run.

    Args:
        config: of the run.
        roles: of the groups.
        folder: where the run keeps its trajectories.
        disturbance: what is done to what the student sees.

    Attributes:
        rows: the distinct features, where they are bytes.
        target_names: of the privileged targets of each step; () without any.
        train: what has been read or collected so far.
        validation: the same, which nobody is trained on.
    """

    def __init__(
        self,
        config: CloneConfig,
        roles: Roles,
        folder: Path,
        disturbance: Disturbance,
    ) -> None:
        self.config, self.settings, self.roles = config, config.clone, roles
        self.folder, self.disturbance = folder, disturbance
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
        self.rows = Rows(group.tokens.num_features) if bytes_ else None
        self.target_names = self._target_names()
        self.train: Trajectories | None = None
        self.validation: Trajectories | None = None
        self._games: dict[str, Games] = {}
        self._check_student_world()

    def _target_names(self) -> tuple[str, ...]:
        """Return those of the given trajectories or, without any, of the teacher."""
        if self.config.trajectories is not None:
            return _target_names_of(self._given_paths()[0])
        return () if self.roles.teacher is None else self.roles.teacher.target_names

    def _check_student_world(self) -> None:
        """Refuse other worlds for the student that are of another kind."""
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

    def world(self, count: int, first: int, student: bool = False) -> BatchedEnv:
        """Worlds ``first`` to ``first + count - 1``, perhaps those for the student."""
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
        """What the student plays under in the worlds from ``first`` on."""
        return self.disturbance.at(first, PLAY)

    def add(self, number: int, student: Agent, learned: int | None) -> None:
        """Read the round ``number``, or let it be played.

        Args:
            number: of the round; 0 is the teacher's own play.
            student: plays in the others.
            learned: batches that it has learned from; None: this round was begun
                before, so what was collected then is taken.

        Raises:
            InputError: trajectories of another world or teacher, damaged ones, or
                none that is long or good enough.
        """
        path = round_path(self.folder, number)
        if not number and self.config.trajectories is not None:
            rounds = self._given(self._given_paths())
        elif path.is_dir() and learned in (None, read_about(path).get("learned")):
            rounds = [load_round(path, self.rows)]
        else:
            rounds = [self._collect(number, student, learned or 0)]
            save_round(path, rounds[0], self.rows)
        before = [part for part in (self.train,) if part is not None]
        self.train = join([*before, *(each.train for each in rounds)])
        before = [part for part in (self.validation,) if part is not None]
        self.validation = join([*before, *(each.validation for each in rounds)])

    def _given_paths(self) -> list[Path]:
        """Rounds that an earlier run has collected."""
        path = Path(self.config.trajectories or "")
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        found = rounds_in(folder)
        if not found:
            raise InputError(
                f"trajectories: {path} holds none: expected the folder of a cloning "
                "run, or its trajectories"
            )
        return found

    def _refuse_other_targets(self, found: list[Path]) -> None:
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
        """Read what an earlier run has collected."""
        path = self.config.trajectories
        for each in found:
            self._refuse_others(each)
        teachers = {str(read_about(each).get("teacher")) for each in found}
        if len(teachers) > 1:
            raise InputError(
                f"trajectories: {path} is mixed: expected rounds of one teacher, got "
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
        self._refuse_other_targets(found)
        count = sum(len(part.train) for part in rounds)
        if not count or not any(len(part.validation) for part in rounds):
            raise InputError(
                f"trajectories: {path} is empty: expected some to learn from, and some "
                "for validation"
            )
        steps = sum(part.train.num_steps for part in rounds)
        print(f"{path}: {count} trajectories, {steps:,} steps", file=sys.stderr)
        return rounds

    def _refuse_others(self, path: Path) -> None:
        """Refuse a round of another world or teacher."""
        found, wanted = read_about(path), dict(self.about)
        if wanted["teacher"] is None:
            del wanted["teacher"]
        for each in (found, wanted):
            env = each.pop("env", {})
            each |= {f"env.{k}": v for k, v in env.items() if k not in NO_MATTER}
        for key, value in wanted.items():
            if found.get(key) != value:
                raise InputError(
                    f"trajectories: {path} is of another kind: expected {key} = "
                    f"{value}, got {found.get(key)}"
                )

    def _collect(self, number: int, student: Agent, learned: int) -> Round:
        settings = self.settings
        episodes = settings.round_episodes if number else settings.episodes
        first = settings.episodes + (number - 1) * episodes if number else 0
        played = {
            name: self._play(number, student, start, count, name)
            for name, start, count in (
                ("validation", VALIDATION_WORLDS, settings.validation_episodes),
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
                "trajectories, too: expected a world with more than so few starts, or "
                "fewer clone.validation_episodes"
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
                world = self.world(episodes, first, student=True)
                seen = self.perturbation(first)
                self._games[name] = Games(self.roles, world, self.rows, student, seen)
            return self._games[name].play(settings.round_steps, settings.beta**number)
        with Progress(episodes, unit=f"{name} episodes") as progress:
            return collect(
                self.roles,
                lambda count, start: self.world(count, start, is_student),
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
        """Those that are long and good enough."""
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
