"""Dataset of a cloning run: the trajectories of all rounds, collected or read.

Each round has a folder with safetensors of its trajectories, its description in
``about.json`` and checksums in ``manifest.json``. The teacher plays in round 0, the
student in later rounds.
"""

from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.description import describe_env, validate_env_change
from marl_pool.files.atomic import new_folder, write_json
from marl_pool.files.manifest import validate_intact, write_manifest
from marl_pool.files.reading import read_json
from marl_pool.files.tensors import write_tensors
from marl_pool.policies.base import SequencePolicy
from marl_pool.training.cloning.sampler import Augmentation
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.cloning.teacher import Roles
from marl_pool.training.cloning.trajectories import (
    PER_TRAJECTORY,
    STEP_PARTS,
    BehaviorPolicy,
    RowTable,
    Trajectories,
    join,
)
from marl_pool.utils.errors import InputError, one_line
from marl_pool.utils.progress import Progress
from marl_pool.utils.randomness import VALIDATION_ENVS
from marl_pool.utils.text import print_note
from marl_pool.version import __version__

FOLDER, ABOUT = "trajectories", "about.json"
FORMAT = 2
NUMBERS, TABLE = "features", "table"
SPLITS = ("train", "validation")
Splits = dict[str, Trajectories]
"""Trajectories by the names in `SPLITS`."""


def round_path(folder: Path, number: int) -> Path:
    """Return the folder of a round."""
    return folder / f"round_{number:03d}"


def save_round(
    path: Path, splits: Splits, description: dict[str, Any], rows: RowTable | None
) -> None:
    """Write a round atomically; ``rows`` is None unless features are uint8."""
    description = {
        "format": FORMAT,
        "package_version": __version__,
        **description,
        "digests": {name: list(split.digests) for name, split in splits.items()},
    }
    with new_folder(path) as folder:
        for name, split in splits.items():
            tensors = {
                **split.steps,
                **{part: getattr(split, part) for part in PER_TRAJECTORY},
            }
            # Store only the rows in use, and renumber them.
            if rows is not None:
                tensors[TABLE], numbers = rows.select(split.steps[NUMBERS])
                tensors[NUMBERS] = numbers.int()
            write_tensors(tensors, folder / f"{name}.safetensors")
        write_json(folder / ABOUT, description, indent=1)
        write_manifest(folder)


def load_round(path: Path, rows: RowTable | None) -> Splits:
    """Read a round that `save_round` wrote, and extend the table ``rows``.

    Raises:
        InputError: missing or damaged files, or another format.
    """
    description = read_about(path)
    try:
        validate_intact(path)
        return {
            name: _read(
                path / f"{name}.safetensors", description["digests"][name], rows
            )
            for name in SPLITS
        }
    except InputError as error:
        raise InputError(f"trajectories: {error}") from error
    except (SafetensorError, OSError, LookupError, RuntimeError) as error:
        raise InputError(
            f"trajectories: {path} is damaged: {one_line(error)}"
        ) from error


def read_about(path: Path) -> dict[str, Any]:
    """Read the description of a round's trajectories.

    Raises:
        InputError: a missing or damaged file, or another format.
    """
    file = path / ABOUT
    try:
        description = read_json(file)
    except (OSError, ValueError) as error:
        raise InputError(f"trajectories: {file} cannot be read: {error}") from error
    file_format = description.get("format") if isinstance(description, dict) else None
    if file_format != FORMAT:
        raise InputError(
            f"trajectories: {file}: expected format {FORMAT}, got {file_format!r}"
        )
    return dict(description)


def _read(file: Path, digests: list[str], rows: RowTable | None) -> Trajectories:
    tensors = load_file(file)
    steps = {name: tensors[name] for name in STEP_PARTS if name in tensors}
    # Add the rows to the run's table, and renumber them accordingly.
    if TABLE in tensors:
        assert rows is not None
        numbers = rows.number(tensors[TABLE])
        flat = steps[NUMBERS].flatten().long()
        steps[NUMBERS] = numbers[flat].view(steps[NUMBERS].shape)
    per_trajectory = (tensors[name] for name in PER_TRAJECTORY)
    return Trajectories(steps, tuple(digests), *per_trajectory)


class CloneDataset:
    """Aggregated trajectories of a run's rounds, stored in a folder.

    Attributes:
        rows: table of distinct features; None unless features are uint8.
        splits: trajectories of all rounds so far.
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
        is_bytes = group.tokens.dtype == "uint8"
        self.rows = RowTable(group.tokens.num_features) if is_bytes else None
        self.splits: Splits = {}
        self._games: dict[str, BehaviorPolicy] = {}
        validate_env_change(config.env, self.settings.rollout_env, "clone.rollout_env")

    def make_env(self, first: int, count: int, student: bool = False) -> BatchedEnv:
        """Make ``count`` environments, numbered from ``first`` on.

        With ``student``, they are for play by the student: ``rollout_env`` is applied.
        """
        config = self.config
        return make_batched_env(
            num_envs=count,
            seed=config.seed,
            first_env=first,
            device=config.device,
            **{**config.env, **(self.settings.rollout_env if student else {})},
        )

    def add(self, number: int, student: SequencePolicy, learned: int | None) -> None:
        """Add the trajectories of a round: read them, or collect and save them.

        Args:
            number: number of the round; the teacher plays in round 0.
            student: policy that plays in the later rounds.
            learned: batches that the student has learned from so far. Trajectories
                saved after another number of batches are collected again. None if the
                round began before the run was resumed: read the saved ones.

        Raises:
            InputError: damaged trajectories, or none that is long enough.
        """
        path = round_path(self.folder, number)
        # Read the round of a resumed run, unless its student has changed since.
        if learned is None and number and not path.is_dir():
            raise InputError(
                f"{path}: expected the trajectories of round {number}, which cannot be "
                "collected again, got no such folder"
            )
        if path.is_dir() and learned in (None, read_about(path).get("learned")):
            splits = load_round(path, self.rows)
        else:
            splits, description = self._collect(number, student, learned or 0)
            save_round(path, splits, description, self.rows)
        # Aggregate it with all earlier rounds, as DAgger does.
        self.splits = {
            name: join([self.splits.get(name), splits[name]]) for name in SPLITS
        }

    def _collect(
        self, number: int, student: SequencePolicy, learned: int
    ) -> tuple[Splits, dict[str, Any]]:
        settings = self.settings
        # The teacher plays in round 0; each later round has new environments.
        episodes = settings.round_episodes if number else settings.episodes
        first = settings.episodes + (number - 1) * episodes if number else 0
        # Play in the validation environments, then in the training environments.
        play = partial(self._play, number, student)
        held_out = settings.validation_episodes
        validation = play(VALIDATION_ENVS, held_out, "validation")
        train = play(first, episodes, "train")
        description = {
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
        # Drop duplicates, so that no trajectory is in both splits.
        earlier_digests = [d for split in self.splits.values() for d in split.digests]
        validation = validation.without_duplicates(earlier_digests)
        kept = train.without_duplicates([*earlier_digests, *validation.digests])
        if not len(kept) and not number:
            raise InputError(
                f"env: all {len(train)} training trajectories are also validation "
                "trajectories: expected an environment with more initial states, or "
                "fewer clone.validation_episodes"
            )
        print_note(
            f"round {number}: {len(kept)} trajectories to learn from, "
            f"{kept.num_steps:,} steps; {len(validation)} for validation; "
            f"mean return {description['mean_return']:.2f}"
        )
        return {"train": kept, "validation": validation}, description

    def _play(
        self, number: int, student: SequencePolicy, first: int, episodes: int, name: str
    ) -> Trajectories:
        # From round 1 on, the student plays with a perturbation and the teacher labels.
        settings, by_student = self.settings, number > 0

        def build(start: int, count: int) -> BehaviorPolicy:
            return BehaviorPolicy(
                self.roles,
                self.make_env(start, count, by_student),
                self.rows,
                student if by_student else None,
                self.augmentation.build(self.roles.group) if by_student else None,
            )

        # Continue the games of the last round if rounds have a fixed number of steps.
        if by_student and settings.round_steps is not None:
            if name not in self._games:
                self._games[name] = build(first, episodes)
            return self._games[name].advance(settings.round_steps)
        # Otherwise play one episode in each environment, ``num_envs`` at a time.
        parts: list[Trajectories] = []
        with Progress(episodes, unit=f"{name} episodes") as progress:
            for done in range(0, episodes, settings.num_envs):
                count = min(settings.num_envs, episodes - done)
                parts.append(build(first + done, count).episodes())
                steps = sum(part.num_steps for part in parts)
                progress.update(done + count, steps=steps)
        return join(parts)

    def _long(self, trajectories: Trajectories) -> Trajectories:
        """Keep trajectories with at least ``min_length`` steps."""
        if not len(trajectories):
            raise InputError(
                f"env: expected episodes in which an agent of {self.roles.group!r} "
                "acts, got none with such a step: there is nothing to learn from"
            )
        min_length = self.settings.min_length
        long = trajectories.lengths >= min_length
        if not long.any():
            raise InputError(
                f"clone.min_length: none of {len(trajectories)} trajectories has "
                f"{min_length} steps; the longest has {trajectories.lengths.max()}"
            )
        return trajectories.keep(long)
