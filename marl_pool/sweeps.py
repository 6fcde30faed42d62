"""Sweep folders and the table of their results.

    SWEEP/sweep.yaml        the grid, the other overrides, and the package's version
    SWEEP/trials/NAME/      a run folder for each trial: see `marl_pool.runs`
    SWEEP/table.csv         a row for each logged iteration of each trial

Files are replaced atomically: a crash leaves the old content or the new.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from marl_pool.runs import TRAIN, Run
from marl_pool.utils.atomic import (
    discard_leftovers,
    locked,
    make_folder,
    new_file,
    validate_inside,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import is_intact_text, sealed_text
from marl_pool.utils.reading import read_yaml
from marl_pool.utils.tables import read_csv, write_csv
from marl_pool.version import __version__

CONTENT, TABLE = "sweep.yaml", "table.csv"
LOCK, VERSION = ".lock", "package_version"
STUDIED = (TRAIN, "fit")
"""Verbs whose runs can be trials."""
LONGEST_NAME = 200
"""Characters of a trial name; most file systems allow 255 bytes."""

Grid = dict[str, list[Any]]
"""Key → values, in the order of the keys in a trial's name."""


class Trial(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: name of its folder.
        values: value of each swept key, in the order of the grid.
        config: checked configuration of the run, as plain data.
    """

    name: str
    values: dict[str, Any]
    config: dict[str, Any]


class Sweep:
    """Folder of a sweep.

    Args:
        path: path of the folder, which need not exist.
        grid: key → values.
        overrides: overrides of all trials, as typed.
        config_dir: folder of the user's YAML files; None for none.
        verb: command that makes each run, train or fit.
    """

    def __init__(
        self,
        path: str | Path,
        grid: Grid,
        overrides: Sequence[str],
        config_dir: str | Path | None = None,
        verb: str = TRAIN,
    ) -> None:
        self.path, self.grid, self.overrides = Path(path), grid, list(overrides)
        self.config_dir = config_dir and str(Path(config_dir).resolve())
        self.verb = verb

    @classmethod
    def open(cls, path: str | Path) -> "Sweep":
        """Read the ``sweep.yaml`` of an earlier `write`.

        Raises:
            InputError: ``sweep.yaml`` is missing or broken.
        """
        file = Path(path) / CONTENT
        try:
            content = read_yaml(file)
            # The version comes last, so a truncated file lacks it.
            del content[VERSION]
            if not is_intact_text(file.read_text(encoding="utf-8")):
                raise ValueError(
                    "it has changed since it was written: its checksum differs "
                    "(if you changed it on purpose, remove its last line)"
                )
            found = cls(path, **content)
        except FileNotFoundError as error:
            raise InputError(f"{path} is no sweep: it has no {CONTENT}") from error
        except InputError:
            raise
        except (TypeError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{file} cannot be read: {reason}") from error
        found._check(file)
        return found

    def _check(self, file: Path) -> None:
        """Reject contents that `write` does not produce."""
        grid, overrides, folder = self.grid, self.overrides, self.config_dir
        fitting = {
            "grid: expected lists by key": isinstance(grid, dict)
            and all(isinstance(key, str) for key in grid)
            and all(isinstance(own, list) and own for own in grid.values()),
            "overrides: expected a list of texts": all(
                isinstance(t, str) for t in overrides
            ),
            "config_dir: expected a folder": isinstance(folder, str | None),
            f"verb: expected one of {', '.join(STUDIED)}": self.verb in STUDIED,
        }
        for expected, fits in fitting.items():
            if not fits:
                key = expected.partition(":")[0]
                got = getattr(self, key)
                raise InputError(f"{file}: {expected}, got {got!r:.80}")

    @staticmethod
    def is_at(path: str | Path) -> bool:
        """Return True if the folder is that of a sweep."""
        return (Path(path) / CONTENT).is_file()

    def write(self) -> None:
        """Write ``sweep.yaml``."""
        content = {
            "grid": self.grid,
            "overrides": self.overrides,
            "config_dir": self.config_dir,
            # The default verb is left out.
            **({} if self.verb == TRAIN else {"verb": self.verb}),
            VERSION: __version__,
        }
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        with new_file(self.path / CONTENT) as out:
            out.write(sealed_text(text))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and lock it against other processes.

        Raises:
            InputError: it cannot be created, a part of it is a link that leads out of
                it, or another process holds the lock.
        """
        trials = self.path / "trials"
        for folder in (self.path, trials):
            for item in folder.iterdir() if folder.is_dir() else ():
                validate_inside(item, self.path)
        try:
            make_folder(trials)
        except OSError as error:
            raise InputError(f"{self.path} cannot be made: {error.strerror}") from error
        with locked(self.path / LOCK, f"{self.path}: another process is running it"):
            discard_leftovers(self.path)
            yield

    def run_path(self, trial: Trial) -> Path:
        """Return the run folder of a trial."""
        return self.path / "trials" / trial.name

    def run(self, trial: Trial) -> Run | None:
        """Open the run of a trial; None if it was not started."""
        path = self.run_path(trial)
        return Run.open(path) if (path / "config.yaml").is_file() else None

    @property
    def table_path(self) -> Path:
        """CSV file of the results."""
        return self.path / TABLE

    def write_table(self, trials: Sequence[Trial], status: Mapping[str, str]) -> None:
        """Rewrite the table: one row for each logged iteration of each trial.

        Its columns are ``trial``, ``status``, the swept keys, and every metric that
        any trial has; a missing metric is an empty cell, which `read_table` returns as
        NaN. Of a damaged ``metrics.csv`` the readable rows are used.

        Args:
            trials: trials in the order of the rows.
            status: state of each trial, by name.
        """
        rows = []
        for trial in trials:
            own = {"trial": trial.name, "status": status[trial.name]}
            own |= {key: _cell(value) for key, value in trial.values.items()}
            run = self.run(trial)
            rows += [own | row for row in run.metrics.readable_rows()] if run else []
        keys = dict.fromkeys(key for trial in trials for key in trial.values)
        metrics = dict.fromkeys(key for row in rows for key in row)
        columns = list(dict.fromkeys(("trial", "status", *keys, *metrics)))
        write_csv(self.table_path, columns, rows)


def read_table(path: str | Path) -> list[dict[str, Any]]:
    """Read the table of a sweep.

    Args:
        path: a ``table.csv``, or the folder of a sweep.

    Returns:
        One dict for each row. A metric is a number, NaN where it is missing. The value
        of a swept key is a number, a bool, None, or text; a list is its JSON text.

    Raises:
        InputError: there is no such table.
    """
    path = Path(path)
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such table")
    return [{key: _value(text) for key, text in row.items()} for row in read_csv(file)]


def trial_name(values: Mapping[str, Any]) -> str:
    """Name the folder of a trial after its swept values: ``pooling=ada,seed=0``.

    Characters that are unsafe in a path are percent-encoded, so that names stay
    distinct; a long name is truncated and ends in a checksum.
    """
    texts = (f"{key}={_label(value)}" for key, value in values.items())
    name = quote(",".join(texts), safe="=,+:[]")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{zlib.crc32(name.encode()):08x}"


def default_path(label: str) -> Path:
    """Return ``sweeps/<date-time>-<label>`` for a new sweep."""
    return Path("sweeps") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}"


def _label(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def _cell(value: Any) -> Any:
    """Format a swept value for the table: JSON, except for numbers and plain text."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return value if numeric else _label(value)


def _value(text: str) -> Any:
    if text in ("null", "true", "false"):
        return json.loads(text)
    for kind in (int, float):
        try:
            return kind(text or "nan")
        except ValueError:
            continue
    return text
