"""Run folders, written by this module alone.

    RUN/config.yaml           every key of the run, and the package's version
    RUN/metrics.csv           one row an iteration
    RUN/events.out.tfevents…  the same for TensorBoard, where tensorboardX is installed
    RUN/checkpoints/iter_…    what training resumes from, each with its manifest.json
    RUN/policy/               the best policy, for `marl_pool.load_policy`; best.json in
                              it says from which iteration, and how good it was
    RUN/evaluation/           results of `marl-pool evaluate`
    RUN/videos/               results of `marl-pool render`
    RUN/error.txt             tracebacks, where an exception stopped a run or process

What a crash or a power cut must not spoil is written aside, synced to the disk and then
renamed (`marl_pool.utils.atomic`), and its checksums tell what was damaged since
(`marl_pool.utils.manifest`).
"""

import json
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from marl_pool.utils.atomic import (
    LEFTOVER,
    appended,
    discard,
    discard_leftovers,
    locked,
    make_folder,
    new_file,
    new_folder,
    recover,
    refuse_link_out,
    standing,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import (
    add_to_manifest,
    is_intact_text,
    problem_of,
    read_manifest,
    sealed_text,
    write_manifest,
)
from marl_pool.utils.metrics import ITERATION, Metrics, free
from marl_pool.utils.reading import read_json, read_yaml
from marl_pool.version import __version__

CONFIG, METRICS, LOCK, ERROR = "config.yaml", "metrics.csv", ".lock", "error.txt"
VERSION, VERB, TRAIN = "package_version", "verb", "train"
ENV_CONTEXT = frozenset(
    ("num_envs", "seed", "first_env", "first_episode", "device", "dtype")
)
"""Arguments of an environment that the program fills, not the configuration."""
BEST = "best.json"
CHECKPOINT = re.compile(r"iter_(\d{6}|[1-9]\d{6,})")
POLICY_PARTS = ("policy/config.json", "policy/model.safetensors")
LEARNER = "algorithm/learner_group/learner"
PARTS = {
    "train": (
        "algorithm/algorithm_state.pkl",
        "algorithm/env_runner/state.pkl",
        f"{LEARNER}/state.pkl",
        f"{LEARNER}/rl_module/*/module_state.pkl",
        "progress.json",
        *POLICY_PARTS,
    ),
    "evolve": (
        "strategy.npz",
        "state.json",
        "best/config.json",
        "best/model.safetensors",
        *POLICY_PARTS,
    ),
    "clone": ("learner.safetensors", "progress.json", *POLICY_PARTS),
    "fit": ("learner.safetensors", "learner.json", "progress.json"),
}
"""By verb, the files without which a checkpoint is not whole; a star is any name."""
OUTPUTS = ("evaluation", "videos")
"""Folders that are written without the run's lock."""


class Best(NamedTuple):
    """The best checkpoint so far."""

    iteration: int
    score: float


class Run:
    """One run's folder.

    Made by `create` or `open`, which check it.

    Attributes:
        path: of the folder.
        config: the checked configuration, as plain data.
        version: of the package that wrote ``config``.
        verb: the command that made it: train, evolve or clone.
        metrics: its ``metrics.csv``.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], version: str, verb: str = TRAIN
    ) -> None:
        self.path, self.config, self.version, self.verb = path, config, version, verb
        self._first_event = 0
        self._events: Any = None
        self.metrics = Metrics(self.path / METRICS)
        self._damage: dict[Path, str] = {}

    @classmethod
    def create(
        cls, path: str | Path, config: Mapping[str, Any], verb: str = TRAIN
    ) -> "Run":
        """Make the folder of a new run.

        Args:
            path: of the folder.
            config: checked.
            verb: the command that makes it.

        Raises:
            InputError: it exists and is not empty, or cannot be made.
        """
        path = Path(path)
        if path.is_dir() and any(path.iterdir()):
            raise InputError(
                f"{path} exists; choose another --run-dir or `marl-pool resume {path}`"
            )
        try:
            make_folder(path)
        except OSError as error:
            raise InputError(f"{path} cannot be made: {error.strerror}") from error
        run = cls(path, {}, __version__, verb)
        run.write_config(config)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open the folder of an earlier run.

        Raises:
            InputError: no such folder, or its ``config.yaml`` is missing or broken.
        """
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"{path}: no such run folder")
        file = path / CONFIG
        if not file.is_file():
            raise InputError(f"{path} is no run folder: it has no {CONFIG}")
        config = read_yaml(file)
        # The version stands last, so a file that was cut short lacks it.
        if not isinstance(config, dict) or not isinstance(config.get(VERSION), str):
            raise InputError(
                f"{file} is truncated, or not written by marl_pool: no {VERSION}"
            )
        if not is_intact_text(file.read_text(encoding="utf-8")):
            raise InputError(
                f"{file} has changed since it was written: its checksum differs "
                "(if you changed it on purpose, remove its last line)"
            )
        verb = str(config.pop(VERB, TRAIN))
        return cls(path, config, config.pop(VERSION), verb)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``config.yaml``.

        Raises:
            InputError: it cannot be written.
        """
        self.config, self.version = dict(config), __version__
        # A run of `train` names no verb, as those of earlier versions did.
        verb = {} if self.verb == TRAIN else {VERB: self.verb}
        content = {**self.config, **verb, VERSION: self.version}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        try:
            with new_file(self.path / CONFIG) as out:
                out.write(sealed_text(text))
        except OSError as error:
            file = self.path / CONFIG
            raise InputError(f"{file} cannot be written: {error.strerror}") from error

    @property
    def env(self) -> dict[str, Any]:
        """The environment that it was trained in: ``{"name": …, **options}``.

        Raises:
            InputError: the configuration names none.
        """
        env = self.config.get("env")
        if not isinstance(env, dict) or not isinstance(env.get("name"), str):
            raise InputError(
                f"{self.path / CONFIG}: expected env.name, the name of an environment, "
                f"got env: {env!r:.80}"
            )
        for key in env:
            if not isinstance(key, str) or key in ENV_CONTEXT:
                raise InputError(
                    f"{self.path / CONFIG}: env: expected options of the environment, "
                    f"got the key {key!r:.80}"
                )
        return env

    @property
    def config_digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of ``config.yaml``."""
        return sha256((self.path / CONFIG).read_bytes()).hexdigest()[:12]

    @property
    def error_path(self) -> Path:
        """Of ``error.txt``; it exists once something went wrong."""
        return self.path / ERROR

    def write_error(self, text: str) -> Path:
        """Append to ``error.txt``, for whoever debugs; return its path."""
        # A full disk must not hide the reason.
        with suppress(OSError), appended(self.error_path) as out:
            out.write(text.rstrip("\n") + "\n")
        return self.error_path

    def discard_if_unused(self) -> None:
        """Remove the folder if nothing but the configuration was ever written."""
        if {item.name for item in self.path.iterdir()} <= {CONFIG, LOCK}:
            shutil.rmtree(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing the same run, and mend what a crash left.

        Raises:
            InputError: another process holds the lock, a part of the folder is a link
                that leads out of it, or nothing can be written there.
        """
        refusal = f"{self.path}: another process is training this run"
        for folder in (self.path, self._checkpoints):
            for item in folder.iterdir() if folder.is_dir() else ():
                refuse_link_out(item, self.path)
        with locked(self.path / LOCK, refusal):
            try:
                recover(self.policy_dir)
                self._discard_leftovers()
            except OSError as error:
                reason = f"{self.path} cannot be written to: {error.strerror}"
                raise InputError(reason) from error
            yield

    def _discard_leftovers(self) -> None:
        folders = (item for item in self.path.iterdir() if item.name not in OUTPUTS)
        for folder in (self.path, *folders):
            if folder.is_dir():
                discard_leftovers(folder)

    # Metrics

    @property
    def metrics_path(self) -> Path:
        """Of ``metrics.csv``; it exists once a row was logged."""
        return self.metrics.path

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row to ``metrics.csv`` and to the TensorBoard events.

        Args:
            row: numbers by name, ``iteration`` among them. The first row fixes the
                names; a later one may leave some out.
        """
        self.metrics.log(row)
        events = self._writer()
        if events is None:
            return
        for name, value in row.items():
            if name != ITERATION and math.isfinite(value):
                events.add_scalar(name, value, int(row[ITERATION]))
        events.flush()

    def rows(self) -> list[dict[str, float]]:
        """All logged rows; NaN where a row left a name out.

        Raises:
            InputError: ``metrics.csv`` is damaged.
        """
        return self.metrics.rows()

    def metrics_problem(self) -> str:
        """How ``metrics.csv`` differs from what was logged up to a checkpoint.

        Empty if it does not, or if no checkpoint knows.
        """
        for checkpoint in reversed(self.checkpoints()):
            if logged := self._about(checkpoint).get("metrics"):
                return self.metrics.problem(logged, iteration_of(checkpoint))
        return ""

    def resume_at(self, iteration: int) -> str:
        """Drop what was logged after ``iteration``, where training goes on.

        Call it before the first `log` of a resumed run. Of a damaged ``metrics.csv``
        the rows that can be read are kept, and the whole of it aside.

        Returns:
            What was lost or is damaged, in one line; empty if nothing.
        """
        self.close()
        self._first_event = iteration + 1
        logged = self._about(self._checkpoint_path(iteration)).get("metrics")
        problem, columns = "", None
        if logged is not None:
            columns = logged["columns"]
            problem = self.metrics.problem(logged, iteration)
            if not problem:
                self.metrics.cut(logged["bytes"])
                return ""
        aside = self.metrics.keep(iteration, columns)
        told = "; ".join(filter(None, (problem, aside)))
        return told and f"{self.path}: {told}"

    def close(self) -> None:
        """Close the event file; a later `log` opens another."""
        if self._events is not None:
            # On a full disk nothing is lost: metrics.csv holds the same.
            with suppress(OSError):
                self._events.close()
            self._events = None

    def _writer(self) -> Any:
        """The open event file; None where tensorboardX is not installed."""
        if self._events is None and find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            first = self._first_event
            # The file's own name ends in whole seconds; a quick resume is another. A
            # short queue would block us for good once a full disk ended its reader.
            self._events = SummaryWriter(
                str(self.path),
                purge_step=first or None,
                # Nobody can put a link in the place of a name with a random end.
                filename_suffix=f".{first}.{secrets.token_hex(4)}",
                max_queue=10_000,
            )
        return self._events

    # Checkpoints

    @contextmanager
    def checkpoint(self, iteration: int, parts: Iterable[str] = ()) -> Iterator[Path]:
        """Yield a folder that becomes the checkpoint of ``iteration`` when left.

        Its manifest also says what ``metrics.csv`` is up to here. If the block raises,
        nothing of it stays.

        Args:
            iteration: after which it is saved.
            parts: files that must be in it, as in `PARTS`.

        Raises:
            OSError: a part is missing, or it cannot be written.
        """
        final = self._checkpoint_path(iteration)
        self._damage.pop(final, None)
        with new_folder(final) as folder:
            yield folder
            if missing := _missing(folder, parts):
                raise OSError(f"{missing} was not written")
            write_manifest(folder, **self.metrics.fix(iteration))
        self._damage[final] = ""

    def checkpoints(self) -> list[Path]:
        """All checkpoints, oldest first, whether they are whole or not."""
        if not self._checkpoints.is_dir():
            return []
        found = (
            path
            for path in self._checkpoints.iterdir()
            if CHECKPOINT.fullmatch(path.name) and path.is_dir()
        )
        return sorted(found, key=iteration_of)

    def damage_of(self, checkpoint: Path) -> str:
        """What is wrong with a checkpoint; empty if it is whole.

        One without a manifest, as of earlier versions, must have all its parts.
        """
        if checkpoint not in self._damage:
            self._damage[checkpoint] = self._found_damage(checkpoint)
        return self._damage[checkpoint]

    def _found_damage(self, checkpoint: Path) -> str:
        if checkpoint.is_symlink():
            return "it is a link"
        try:
            return problem_of(checkpoint, links=False) or ""
        except FileNotFoundError:
            missing = _missing(checkpoint, PARTS.get(self.verb, ()))
            return f"{missing} is missing" if missing else ""

    def latest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole, or None."""
        found = reversed(self.checkpoints())
        return next((path for path in found if not self.damage_of(path)), None)

    def trace_of_checkpoints(self) -> str:
        """What shows that a run without checkpoints had some; empty if nothing does."""
        if self.checkpoints():
            return ""
        # Evolution keeps its best before it is first saved.
        if self.verb != "evolve" and (standing(self.policy_dir) / BEST).is_file():
            return f"{self.policy_dir} is the policy of one"
        every = (self.config.get("checkpoint") or {}).get("every")
        logged = max((int(row[ITERATION]) for row in self.rows()), default=0)
        # The last of these is logged before it is saved.
        if isinstance(every, int) and logged > every:
            return f"{self.metrics_path} has {logged} iterations, saved every {every}"
        return ""

    @property
    def iterations_saved(self) -> int:
        """The iteration of the newest whole checkpoint, where `resume` goes on."""
        newest = self.latest_checkpoint()
        return 0 if newest is None else iteration_of(newest)

    def saved(self) -> dict[str, float] | None:
        """The row of metrics that the newest whole checkpoint was saved after."""
        newest = self.latest_checkpoint()
        if newest is None:
            return None
        row: dict[str, float] | None = self._about(newest).get("row")
        if row:
            return row
        last = iteration_of(newest)
        rows = [row for row in self.rows() if row[ITERATION] <= last]
        return rows[-1] if rows else None

    def _about(self, checkpoint: Path) -> dict[str, Any]:
        """The manifest of a checkpoint; {} if it has none that can be read."""
        try:
            return read_manifest(checkpoint)
        except (FileNotFoundError, InputError):
            return {}

    @property
    def best(self) -> Best | None:
        """What `policy_dir` holds: from which iteration, and how good it was."""
        # Until 0.1.0 it stood beside the checkpoints.
        places = (standing(self.policy_dir) / BEST, self._checkpoints / BEST)
        file = next(filter(Path.is_file, places), None)
        if file is None:
            return None
        try:
            return Best(**read_json(file))
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise InputError(f"{file} cannot be read: {error}") from error

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep`` and the best one.

        Those that count are whole; damaged ones are removed once a newer one is there.
        """
        best = self.best
        whole = [path for path in self.checkpoints() if not self.damage_of(path)]
        kept = {*whole[-keep:], *(p for p in whole if best and _is_of(p, best))}
        newest = whole[-1:] and iteration_of(whole[-1])
        for folder in self.checkpoints():
            if folder not in kept and iteration_of(folder) <= (newest or 0):
                discard(folder)
        for unfinished in self._checkpoints.glob(".iter_*"):
            discard(unfinished)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _checkpoint_path(self, iteration: int) -> Path:
        return self._checkpoints / f"iter_{iteration:06d}"

    # Policies

    @property
    def policy_dir(self) -> Path:
        """Where the best policy is, once there is one."""
        return self.path / "policy"

    def policy_damage(self) -> str:
        """What is wrong with the best policy of a run with checkpoints, or nothing."""
        folder = standing(self.policy_dir)
        if self.verb not in PARTS or POLICY_PARTS[0] not in PARTS[self.verb]:
            return ""
        if not (folder / BEST).is_file():
            return f"{BEST} is missing; the next checkpoint becomes the best"
        try:
            return problem_of(folder) or ""
        except FileNotFoundError:  # made by an earlier version
            return ""

    @contextmanager
    def save_policy_dir(self, best: Best | None = None) -> Iterator[Path]:
        """Yield a folder that takes the place of `policy_dir` when left.

        Args:
            best: what the policy is; it changes together with it.
        """
        with new_folder(self.policy_dir) as folder:
            yield folder
            if best is None:
                return
            with new_file(folder / BEST) as out:
                json.dump(best._asdict(), out)
            add_to_manifest(folder, BEST)

    def policy_path(self, which: Literal["best", "last"] | int = "best") -> Path:
        """Folder of a saved policy.

        Args:
            which: the best; that of the last checkpoint (its folder ``policy``); or
                that of the checkpoint of an iteration.

        Raises:
            InputError: there is none.
        """
        saved = {iteration_of(folder): folder for folder in self.checkpoints()}
        if which == "best":
            found = standing(self.policy_dir)
        elif which == "last":
            newest = saved[max(saved)] if saved else self.path / "none"
            if saved and (damage := self.damage_of(newest)):
                raise InputError(
                    f"checkpoint: expected the last to be intact, {newest}: {damage}"
                )
            found = newest / "policy"
        else:
            found = saved.get(which, self.path / "none") / "policy"
        if not found.is_dir():
            whole = (
                str(n) for n, folder in saved.items() if (folder / "policy").is_dir()
            )
            known = ", ".join(whole) or "none yet"
            raise InputError(
                f"{self.path} has no policy {which!r}; checkpoints: {known}"
            )
        return found

    # Results

    @property
    def evaluation_dir(self) -> Path:
        """Folder of evaluations, once there is one."""
        return self.path / "evaluation"

    def make_evaluation_dir(self) -> Path:
        """Make `evaluation_dir` if it does not exist.

        Raises:
            InputError: it cannot be written to.
        """
        return self._writable("evaluation")

    def new_video_path(self, stem: str, suffix: str = ".webm") -> Path:
        """A path in ``videos/`` that no file has; ``stem-2`` and so on if taken.

        Raises:
            InputError: the folder cannot be written to.
        """
        return free(self._writable("videos") / f"{stem}{suffix}")

    def _writable(self, name: str) -> Path:
        """Make a folder; refuse one that cannot be written to before work goes in."""
        folder = self.path / name
        refuse_link_out(folder, self.path)
        try:
            make_folder(folder)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reason = f"{folder} cannot be written to: {error.strerror}"
            raise InputError(reason) from error


def is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing but what a run has before its configuration."""
    names = {item.name for item in folder.iterdir()}
    return all(name == LOCK or LEFTOVER.fullmatch(name) for name in names)


def default_path(config: Mapping[str, Any]) -> Path:
    """``runs/<date-time>-<env>-<pooling>-s<seed>`` for a new run of ``config``.

    A supervised task stands in the place of the env; where there is no pooling, the
    policy or the encoder stands in its place.
    """
    given = (config.get(part) for part in ("pooling", "policy", "encoder"))
    named = [part for part in given if part and part.get("name", "none") != "none"]
    chosen = [config.get("env") or config["task"], *named[:1]]
    label = "-".join(part["name"].rpartition(":")[2] for part in chosen)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{now}-{label}-s{config['seed']}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("iter_"))


def _is_of(checkpoint: Path, best: Best) -> bool:
    return iteration_of(checkpoint) == best.iteration


def _missing(folder: Path, parts: Iterable[str]) -> str:
    """The first of some parts that a folder lacks or that is empty, or nothing."""
    for part in parts:
        found = [path for path in folder.glob(part) if path.is_file()]
        if not found or not all(path.stat().st_size for path in found):
            return part
    return ""
