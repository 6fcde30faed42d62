"""Run folders, written by this module alone.

    RUN/config.yaml           every key of the run, and the package's version
    RUN/metrics.csv           one row an iteration
    RUN/events.out.tfevents…  the same for TensorBoard, where tensorboardX is installed
    RUN/checkpoints/iter_…    what training resumes from; best.json names the best
    RUN/policy/               the best policy, for `marl_pool.load_policy`
    RUN/evaluation/           results of `marl-pool evaluate`
    RUN/videos/               results of `marl-pool render`
    RUN/error.txt             tracebacks, where an exception stopped a run or process

What a crash must not spoil is written aside and then renamed.
"""

import csv
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from marl_pool.atomic import locked, new_file, new_folder, recover, standing
from marl_pool.errors import InputError
from marl_pool.reading import read_yaml
from marl_pool.version import __version__

CONFIG, METRICS, LOCK, ERROR = "config.yaml", "metrics.csv", ".lock", "error.txt"
VERSION, VERB, TRAIN = "package_version", "verb", "train"
ITERATION = "iteration"
ENV_CONTEXT = frozenset(
    ("num_envs", "seed", "first_world", "first_episode", "device", "dtype")
)
"""Arguments of an environment that the program fills, not the configuration."""


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
    """

    def __init__(
        self, path: Path, config: dict[str, Any], version: str, verb: str = TRAIN
    ) -> None:
        self.path, self.config, self.version, self.verb = path, config, version, verb
        self._first_event = 0
        self._events: Any = None

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
            path.mkdir(parents=True, exist_ok=True)
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
            raise InputError(f"{file} is truncated or none of ours: no {VERSION}")
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
                out.write(text)
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
        with suppress(OSError), self.error_path.open("a", encoding="utf-8") as out:
            out.write(text.rstrip("\n") + "\n")
        return self.error_path

    def discard_if_unused(self) -> None:
        """Remove the folder if nothing but the configuration was ever written."""
        if {item.name for item in self.path.iterdir()} <= {CONFIG, LOCK}:
            shutil.rmtree(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing the same run.

        Raises:
            InputError: another process holds the lock.
        """
        refusal = f"{self.path}: another process is training this run"
        with locked(self.path / LOCK, refusal):
            recover(self.policy_dir)
            yield

    # Metrics

    @property
    def metrics_path(self) -> Path:
        """Of ``metrics.csv``; it exists once a row was logged."""
        return self.path / METRICS

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row to ``metrics.csv`` and to the TensorBoard events.

        Args:
            row: numbers by name, ``iteration`` among them. The first row fixes the
                names; a later one may leave some out.
        """
        file = self.metrics_path
        header = _header(file) or list(row)
        with file.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, header, lineterminator="\n")
            if not out.tell():
                writer.writeheader()
            writer.writerow(row)
        events = self._writer()
        if events is None:
            return
        for name, value in row.items():
            if name != ITERATION and math.isfinite(value):
                events.add_scalar(name, value, int(row[ITERATION]))
        events.flush()

    def rows(self) -> list[dict[str, float]]:
        """All logged rows; NaN where a row left a name out."""
        return [
            {name: _number(text) for name, text in row.items()}
            for row in _texts(self.metrics_path)
        ]

    def resume_at(self, iteration: int) -> None:
        """Drop what was logged after ``iteration``, where training goes on.

        Call it before the first `log` of a resumed run.
        """
        self.close()
        self._first_event = iteration + 1
        file = self.metrics_path
        header = _header(file)
        if header is None:
            file.unlink(missing_ok=True)
            return
        kept = [row for row in _texts(file) if int(row[ITERATION]) <= iteration]
        with new_file(file) as out:
            writer = csv.DictWriter(out, header, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)

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
                filename_suffix=f".{first}",
                max_queue=10_000,
            )
        return self._events

    # Checkpoints

    @contextmanager
    def checkpoint(self, iteration: int) -> Iterator[Path]:
        """Yield a folder that becomes the checkpoint of ``iteration`` when left.

        If the block raises, nothing of it stays.
        """
        final = self._checkpoints / f"iter_{iteration:06d}"
        with new_folder(final) as folder:
            yield folder

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(self._checkpoints.glob("iter_*"), key=iteration_of)

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(reversed(self.checkpoints()), None)

    @property
    def iterations_saved(self) -> int:
        """The iteration after which `resume` goes on: of the newest checkpoint."""
        newest = self.latest_checkpoint()
        return 0 if newest is None else iteration_of(newest)

    def saved(self) -> list[dict[str, float]]:
        """The rows of ``metrics.csv`` up to the newest checkpoint."""
        last = self.iterations_saved
        return [row for row in self.rows() if row[ITERATION] <= last]

    @property
    def best(self) -> Best | None:
        """The best checkpoint, as the last `mark_best` says."""
        try:
            return Best(**json.loads(self._best_file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise InputError(f"{self._best_file} cannot be read: {error}") from error

    def mark_best(self, iteration: int, score: float) -> None:
        """Say that the checkpoint of ``iteration`` is the best, with what score."""
        self._checkpoints.mkdir(exist_ok=True)
        with new_file(self._best_file) as out:
            json.dump(Best(iteration, score)._asdict(), out)

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep`` and the best one."""
        best = self.best
        for folder in self.checkpoints()[:-keep]:
            if best is None or iteration_of(folder) != best.iteration:
                shutil.rmtree(folder)

        for unfinished in self._checkpoints.glob(".iter_*"):
            shutil.rmtree(unfinished)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def _best_file(self) -> Path:
        return self._checkpoints / "best.json"

    # Policies

    @property
    def policy_dir(self) -> Path:
        """Where the best policy is, once there is one."""
        return self.path / "policy"

    @contextmanager
    def save_policy_dir(self) -> Iterator[Path]:
        """Yield a folder that takes the place of `policy_dir` when left."""
        with new_folder(self.policy_dir) as folder:
            yield folder

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
            found = saved[max(saved)] / "policy" if saved else self.path / "none"
        else:
            found = saved.get(which, self.path / "none") / "policy"
        if not found.is_dir():
            known = ", ".join(map(str, saved)) or "none yet"
            raise InputError(
                f"{self.path} has no policy {which!r}; checkpoints: {known}"
            )
        return found

    # Results

    @property
    def evaluation_dir(self) -> Path:
        """Where evaluations are written; made when asked for.

        Raises:
            InputError: it cannot be written to.
        """
        return _writable(self.path / "evaluation")

    def new_video_path(self, stem: str, suffix: str = ".webm") -> Path:
        """A path in ``videos/`` that no file has; ``stem-2`` and so on if taken.

        Raises:
            InputError: the folder cannot be written to.
        """
        folder = _writable(self.path / "videos")
        path, number = folder / f"{stem}{suffix}", 1
        while path.exists():
            number += 1
            path = folder / f"{stem}-{number}{suffix}"
        return path


def _writable(folder: Path) -> Path:
    """Make a folder; refuse one that cannot be written to before work goes into it."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise InputError(f"{folder} cannot be written to: {error.strerror}") from error


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


def _header(file: Path) -> list[str] | None:
    if not file.is_file():
        return None
    with file.open(newline="", encoding="utf-8") as lines:
        first = lines.readline()
    return next(csv.reader([first])) if first.endswith("\n") else None


def _texts(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as they are written."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        # A line without its end was cut off by a crash.
        whole = [line for line in lines if line.endswith("\n")]
    return list(csv.DictReader(whole))


def _number(text: str | None) -> float:
    if not text:
        return math.nan
    return int(text) if text.lstrip("-").isdigit() else float(text)
