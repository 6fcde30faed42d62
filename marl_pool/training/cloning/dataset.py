"""Dataset of a cloning run: the trajectories of all rounds, collected or read."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.description import describe_env
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent
from marl_pool.training.cloning.behaviour_policy import BehaviourPolicy, Roles
from marl_pool.training.cloning.recorder import RowTable
from marl_pool.training.cloning.sampler import PLAY, Augmentation
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.cloning.storage import (
    Round,
    load_round,
    read_about,
    round_path,
    save_round,
)
from marl_pool.training.cloning.trajectories import Trajectories, join
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress
from marl_pool.utils.randomness import VALIDATION_ENVS

FOLDER = "trajectories"
IGNORED_OPTIONS = ("threads",)
"""Options of an environment that do not affect its dynamics."""


def collect(
    build: Callable[[int, int], BehaviourPolicy],
    first: int,
    episodes: int,
    num_envs: int,
    unit: str = "episodes",
) -> Trajectories:
    """Play one episode in each of ``episodes`` environments, ``num_envs`` at a time.

    ``build`` builds the policy that plays, with its environments, given the number of
    the first one and their count; ``unit`` is that of the progress bar.
    """
    parts: list[Trajectories] = []
    with Progress(episodes, unit=unit) as progress:
        for done in range(0, episodes, num_envs):
            count = min(num_envs, episodes - done)
            parts.append(build(first + done, count).episodes())
            steps = sum(part.num_steps for part in parts)
            progress.update(done + count, steps=steps)
    return join(parts)


class CloneDataset:
    """Aggregated trajectories of a run's rounds, stored in a folder.

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
        group, teacher = describe_env(config.env).groups[roles.group], roles.teacher
        # Describe the data, so that trajectories of another task are not mixed in.
        about = {
            "group": roles.group,
            "spec": group.tokens.to_json(),
            "actions": ActionSpec.of(group.action_space).to_json(),
            "env": config.env,
            "teacher": teacher and teacher.identity,
        }
        # As it is read from a file, to be compared with that of other trajectories.
        self.about: dict[str, Any] = json.loads(json.dumps(about))
        # Number the distinct rows of byte features: screens repeat them often.
        bytes_ = group.tokens.dtype == "uint8"
        self.rows = RowTable(group.tokens.num_features) if bytes_ else None
        self.train: Trajectories | None = None
        self.validation: Trajectories | None = None
        self._games: dict[str, BehaviourPolicy] = {}
        # Trajectories of an earlier run, if given, have targets of their own.
        self._given = {path: read_about(path) for path in self._given_paths()}
        self.target_names = () if teacher is None else teacher.target_names
        if self._given:
            self.target_names = _target_names(next(iter(self._given.values())))
        self._validate_student_env()

    def _given_paths(self) -> list[Path]:
        """List the folders of an earlier run's rounds."""
        if self.config.trajectories is None:
            return []
        path = Path(self.config.trajectories)
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        if not (found := sorted(folder.glob("round_*"))):
            raise InputError(
                "trajectories: expected the folder of a cloning run, or of its "
                f"trajectories, got {path} without any"
            )
        return found

    def _validate_student_env(self) -> None:
        """Validate that ``rollout_env`` changes neither tokens nor actions."""
        env, group = self.config.env, self.roles.group
        try:
            changed = describe_env({**env, **self.settings.rollout_env})
            if changed.groups.get(group) != describe_env(env).groups[group]:
                raise InputError(
                    "expected options that change neither tokens nor actions"
                )
        except InputError as error:
            raise InputError(f"clone.rollout_env: {error}") from error

    def make_env(self, first: int, count: int, student: bool = False) -> BatchedEnv:
        """Make ``count`` environments, numbered from ``first`` on.

        With ``student``, ``rollout_env`` is applied, for play by the student.
        """
        config = self.config
        return make_batched_env(
            num_envs=count,
            seed=config.seed,
            first_env=first,
            device=config.device,
            **{**config.env, **(self.settings.rollout_env if student else {})},
        )

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
        if not number and self._given:
            rounds = self._read_given()
        # Read the round of a resumed run, unless its student has changed since.
        elif path.is_dir() and learned in (None, read_about(path).get("learned")):
            rounds = [load_round(path, self.rows)]
        else:
            rounds = [self._collect(number, student, learned or 0)]
            save_round(path, rounds[0], self.rows)
        # Aggregate it with all earlier rounds, as DAgger does.
        self.train = join([self.train, *(part.train for part in rounds)])
        self.validation = join([self.validation, *(part.validation for part in rounds)])

    # Trajectories of an earlier run

    def _read_given(self) -> list[Round]:
        # Read the rounds; some losses need the teacher's logits.
        self._validate_given()
        path, option = self.config.trajectories, self.settings.option_with_logits
        rounds = [load_round(each, self.rows) for each in self._given]
        if option and any("logits" not in part.train.steps for part in rounds):
            raise InputError(f"{option}: {path} holds no logits of the teacher")
        count = sum(len(part.train) for part in rounds)
        if not count or not any(len(part.validation) for part in rounds):
            raise InputError(
                f"trajectories: expected training and validation trajectories in {path}"
                ", got none of one kind"
            )
        steps = sum(part.train.num_steps for part in rounds)
        print(f"{path}: {count} trajectories, {steps:,} steps", file=sys.stderr)
        return rounds

    def _validate_given(self) -> None:
        """Reject rounds of another environment, of two teachers or sets of targets."""
        # The environment, group and spaces must be those of this run.
        for path, about in self._given.items():
            found = _flat(about)
            for key, value in _flat(self.about).items():
                if found.get(key) != value and (key, value) != ("teacher", None):
                    raise InputError(
                        f"trajectories: {path}: expected {key} = {value}, "
                        f"got {found.get(key)}"
                    )
        teachers = {str(about.get("teacher")) for about in self._given.values()}
        if len(teachers) > 1:
            raise InputError(
                "trajectories: expected rounds of one teacher in "
                f"{self.config.trajectories}, got {', '.join(sorted(teachers))}"
            )
        # Later rounds have the targets of this run's own teacher.
        weight, teacher = self.settings.auxiliary, self.roles.teacher
        named = {str(path): _target_names(about) for path, about in self._given.items()}
        if self.settings.rounds and teacher is not None:
            named[teacher.identity] = teacher.target_names
        for source, names in named.items():
            if weight and names != self.target_names:
                raise InputError(
                    f"clone.auxiliary: expected 0, got {weight:g}: "
                    f"expected the privileged targets {', '.join(self.target_names)}, "
                    f"got {', '.join(names) or 'none'} from {source}"
                )

    # New trajectories

    def _collect(self, number: int, student: Agent, learned: int) -> Round:
        settings = self.settings
        # Round 0 is the teacher's; each later round has environments of its own.
        episodes = settings.round_episodes if number else settings.episodes
        first = settings.episodes + (number - 1) * episodes if number else 0
        # Play in the environments of validation and, then, in those of training.
        play = partial(self._play, number, student)
        held_out = settings.validation_episodes
        validation = play(VALIDATION_ENVS, held_out, "validation")
        train = play(first, episodes, "train")
        # Describe the round in the file that is saved with it.
        about = {
            **self.about,
            "round": number,
            "learned": learned,
            "privileged_targets": list(self.target_names),
            "rollout_env": settings.rollout_env if number else {},
            "played": {"validation": len(validation), "train": len(train)},
            "mean_return": float(train.returns.mean()),
        }
        # Drop the teacher's short trajectories, but none of the student's.
        if not number:
            validation, train = self._long(validation), self._long(train)
        # Drop duplicates, so that no trajectory is on both sides.
        validation = validation.without_duplicates()
        earlier = (validation, self.validation, self.train)
        known = [d for part in earlier if part is not None for d in part.digests]
        kept = train.without_duplicates(known)
        if not len(kept) and not number:
            raise InputError(
                f"env: all {len(train)} training trajectories are validation "
                "trajectories, too: expected an environment with more initial states, "
                "or fewer clone.validation_episodes"
            )
        print(
            f"round {number}: {len(kept)} trajectories to learn from, "
            f"{kept.num_steps:,} steps; {len(validation)} for validation; "
            f"mean return {about['mean_return']:.2f}",
            file=sys.stderr,
        )
        return Round(kept, validation, about)

    def _play(
        self, number: int, student: Agent, first: int, episodes: int, name: str
    ) -> Trajectories:
        # From round 1 on, the student plays with a perturbation and the teacher labels.
        settings, by_student = self.settings, number > 0

        def build(start: int, count: int) -> BehaviourPolicy:
            return BehaviourPolicy(
                self.roles,
                self.make_env(start, count, by_student),
                self.rows,
                student if by_student else None,
                self.augmentation.at(start, PLAY) if by_student else None,
            )

        # Collect whole episodes, unless rounds have a number of steps.
        if not by_student or settings.round_steps is None:
            unit = f"{name} episodes"
            return collect(build, first, episodes, settings.num_envs, unit)
        # Continue the games of the last round.
        if name not in self._games:
            self._games[name] = build(first, episodes)
        return self._games[name].advance(settings.round_steps)

    def _long(self, played: Trajectories) -> Trajectories:
        """Keep trajectories with at least ``min_length`` steps."""
        least = self.settings.min_length
        long = played.lengths >= least
        if not long.any():
            raise InputError(
                f"clone.min_length: none of {len(played)} trajectories has {least} "
                f"steps; the longest has {played.lengths.max()}"
            )
        return played.keep(long)


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description with the environment's options beside the other entries."""
    options = about.get("env", {}).items()
    return {
        **{key: value for key, value in about.items() if key != "env"},
        **{f"env.{k}": value for k, value in options if k not in IGNORED_OPTIONS},
    }


def _target_names(about: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(about.get("privileged_targets", ()))
