"""Dataset of a cloning run: the trajectories of all rounds, collected or read."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.description import describe_env, validate_env_change
from marl_pool.policies.agent import Agent
from marl_pool.training.cloning import storage
from marl_pool.training.cloning.behaviour_policy import BehaviourPolicy, Roles
from marl_pool.training.cloning.recorder import RowTable
from marl_pool.training.cloning.sampler import Augmentation
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.cloning.trajectories import Trajectories, join
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress
from marl_pool.utils.randomness import VALIDATION_ENVS

FOLDER = "trajectories"


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
        # Number the distinct rows of byte features: screens repeat them often.
        bytes_ = group.tokens.dtype == "uint8"
        self.rows = RowTable(group.tokens.num_features) if bytes_ else None
        self.train: Trajectories | None = None
        self.validation: Trajectories | None = None
        self._games: dict[str, BehaviourPolicy] = {}
        validate_env_change(config.env, self.settings.rollout_env, "clone.rollout_env")

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
            InputError: damaged trajectories, or none that is long enough.
        """
        path = storage.round_path(self.folder, number)
        # Read the round of a resumed run, unless its student has changed since.
        if path.is_dir() and learned in (None, storage.read_about(path).get("learned")):
            new = storage.load_round(path, self.rows)
        else:
            new = self._collect(number, student, learned or 0)
            storage.save_round(path, new, self.rows)
        # Aggregate it with all earlier rounds, as DAgger does.
        self.train = join([self.train, new.train])
        self.validation = join([self.validation, new.validation])

    def _collect(self, number: int, student: Agent, learned: int) -> storage.Round:
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
            "round": number,
            "learned": learned,
            "privileged_targets": list(self.roles.teacher.target_names),
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
        return storage.Round(kept, validation, about)

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
                self.augmentation.build() if by_student else None,
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
