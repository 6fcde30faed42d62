"""Sweep folders and the table of their results.

SWEEP/sweep.yaml        the grid or the search space, the other overrides, the version
SWEEP/proposals.yaml    the trials of a search: their values, in order
SWEEP/trials/NAME/      a run folder for each trial: see `marl_pool.runs.run`
SWEEP/table.csv         a row for each logged iteration of each trial
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from pydantic import Field

from marl_pool.files import atomic
from marl_pool.files.manifest import read_complete_yaml, write_yaml
from marl_pool.files.tables import read_csv, write_csv
from marl_pool.options.names import short_name
from marl_pool.options.signatures import (
    check_options,
    check_settings,
    check_value,
    options_of,
    show,
)
from marl_pool.runs.run import CONFIG, TRAIN, Run
from marl_pool.utils.errors import InputError, explain_os_errors
from marl_pool.utils.paths import dated, user_path
from marl_pool.version import __version__

if TYPE_CHECKING:
    from marl_pool.runs.mirror import Mirror

CONTENT, TABLE, TRIALS = "sweep.yaml", "table.csv", "trials"
LOCK, VERSION = ".lock", "package_version"
STUDIED = (TRAIN, "fit")
"""Verbs whose runs can be trials."""
LONGEST_NAME = 200
"""Characters of a trial name."""

Studied = Annotated[str, Field(pattern=f"^({'|'.join(STUDIED)})$")]
Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]
"""Key → values, in the order of the keys in a trial's name."""
Space = dict[str, Annotated[list[Any], Field(min_length=2)]]
"""Key → kind and arguments of its range in a search: ``[log_uniform, 1e-4, 0.1]``."""
CHOICE, UNIFORM = "choice", "uniform"
LOG_UNIFORM, INT_UNIFORM = "log_uniform", "int_uniform"
"""Kinds of ranges; the ends belong to a range."""
PROPOSALS = "proposals.yaml"
DIGITS = 4
"""Significant digits of a proposed number, which keep commands short."""
TEXTS = ("trial", "status")
"""Columns of the table that are text, also where a trial's name is a number."""
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|nan|-?inf")
"""A number in the table: as in JSON, NaN or infinite."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        name: name of its folder.
        values: value of each swept key, in the order of the grid.
    """

    name: str
    values: dict[str, Any]


@dataclass
class Proposal:
    """Values that a search proposed for a trial.

    Attributes:
        values: value of each searched key.
        stopped_early: True if the trial was stopped because others were better.
    """

    values: dict[str, Any]
    stopped_early: bool = False


class Sweep:
    """Folder of a sweep.

    Attributes:
        mirror: mirror of the description and the table, if there is one.

    Args:
        path: folder, which need not exist.
        grid: key → values.
        overrides: overrides of all trials, as typed.
        config_dir: folder of the user's YAML files, if there is one.
        verb: command that makes each run, train or fit.
        space: key → range of a search, which has no grid; None for a grid.
    """

    def __init__(
        self,
        path: str | Path,
        grid: Grid,
        overrides: Sequence[str],
        config_dir: str | Path | None = None,
        verb: Studied = TRAIN,
        space: Space | None = None,
    ) -> None:
        self.path, self.grid = user_path(path), grid
        self.overrides = list(overrides)
        self.space = space
        self.config_dir = config_dir and str(user_path(config_dir).resolve())
        self.verb = verb
        self.mirror: Mirror | None = None

    @classmethod
    def open(cls, path: str | Path) -> "Sweep":
        """Read ``sweep.yaml``; raise `InputError` if it is missing or broken."""
        file = user_path(path) / CONTENT
        try:
            content = read_complete_yaml(file, last=VERSION)
        except FileNotFoundError as error:
            raise InputError(f"{path} is no sweep: it has no {CONTENT}") from error
        del content[VERSION]
        try:
            return cls(path, **check_options("", content, options_of(cls, {"path"})))
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    @staticmethod
    def is_at(path: str | Path) -> bool:
        """Return True if the folder belongs to a sweep."""
        return (user_path(path) / CONTENT).is_file()

    def write(self) -> None:
        """Write ``sweep.yaml``."""
        content = {
            "grid": self.grid,
            "overrides": self.overrides,
            "config_dir": self.config_dir,
            # The default verb is left out.
            **({} if self.verb == TRAIN else {"verb": self.verb}),
            **({} if self.space is None else {"space": self.space}),
            VERSION: __version__,
        }
        write_yaml(self.path / CONTENT, content)

    def proposals(self) -> list[Proposal]:
        """Read the trials of a search; raise `InputError` if the file is damaged."""
        file = self.path / PROPOSALS
        if not file.is_file():
            return []
        content = read_complete_yaml(file, last=VERSION)
        try:
            listed = content["proposals"]
            listed = check_value("proposals", listed, list[dict[str, Any]])
            proposals = [
                Proposal(**check_settings(Proposal, entry)) for entry in listed
            ]
        except (KeyError, InputError) as error:
            raise InputError(f"{file}: expected proposals, got {error}") from error
        space = self.space or {}
        for proposal in proposals:
            if proposal.values.keys() != space.keys():
                raise InputError(
                    f"{file}: expected values of {', '.join(space)}, got "
                    f"{', '.join(proposal.values)}"
                )
            for key, value in proposal.values.items():
                _validate_inside(f"{file}: {key}", value, space[key])
        return proposals

    def write_proposals(self, proposals: Sequence[Proposal]) -> None:
        """Write the trials of a search."""
        content = {"proposals": [asdict(proposal) for proposal in proposals]}
        write_yaml(self.path / PROPOSALS, {**content, VERSION: __version__})
        # Another machine may have to continue the search at any time.
        if self.mirror is not None:
            self.mirror.update((CONTENT, PROPOSALS))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and lock it, or raise `InputError` if that fails."""
        # Do not write through a link to another place.
        trials = self.path / TRIALS
        atomic.validate_inside(self.path, *self.path.glob("*"), *trials.glob("*"))
        with explain_os_errors(f"{self.path} cannot be made"):
            atomic.make_folder(trials)
        refusal = f"{self.path}: another process is running it"
        with atomic.locked(self.path / LOCK, refusal):
            atomic.discard_leftovers(self.path)
            yield

    def run_path(self, trial: Trial) -> Path:
        """Return the run folder of a trial."""
        return self.path / TRIALS / trial.name

    def run(self, trial: Trial) -> Run | None:
        """Open the run of a trial; None if it has not started."""
        path = self.run_path(trial)
        return Run.open(path) if (path / CONFIG).is_file() else None

    @property
    def table_path(self) -> Path:
        """CSV file of the results."""
        return self.path / TABLE

    def write_table(self, trials: Sequence[Trial], status: Mapping[str, str]) -> None:
        """Rewrite the table: one row for each logged iteration of each trial.

        Its columns are ``trial``, ``status``, the swept keys, and the metrics of all
        trials. Of a damaged ``metrics.csv``, the readable rows are used.
        """
        rows = []
        for trial in trials:
            cells = {"trial": trial.name, "status": status[trial.name]}
            cells |= {key: _cell(value) for key, value in trial.values.items()}
            run = self.run(trial)
            rows += [cells | row for row in run.metrics.readable_rows()] if run else []
        # All columns, each once, in the order in which they appear.
        keys = dict.fromkeys(key for trial in trials for key in trial.values)
        metrics = dict.fromkeys(key for row in rows for key in row)
        columns = list(dict.fromkeys(("trial", "status", *keys, *metrics)))
        write_csv(self.table_path, columns, rows)
        if self.mirror is not None:
            self.mirror.update((CONTENT, PROPOSALS, TABLE))


def read_table(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a ``table.csv``, given by its path or by the sweep's folder.

    A metric is a number, NaN where it is missing. The value of a swept key is a number,
    a bool, None, or text; a list is its JSON text.

    Raises:
        InputError: there is no such file.
    """
    path = user_path(path)
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such table")
    return [
        {key: text if key in TEXTS else _value(text) for key, text in row.items()}
        for row in read_csv(file)
    ]


@contextmanager
def naming(trial: str) -> Iterator[None]:
    """Add the name of a trial to the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error} (trial {trial})") from error


def trial_name(values: Mapping[str, Any]) -> str:
    """Name the folder of a trial after its swept values: ``pooling=ada,seed=0``.

    Characters that are unsafe in a path, or that separate values, are percent-encoded,
    and text that reads like another value is quoted, so that names stay distinct; a
    long name is truncated and ends in a checksum.
    """
    keys = [quote(key, safe="+:[]") for key in values]
    texts = map(_text_in_name, values.values())
    name = ",".join(map("=".join, zip(keys, texts, strict=True)))
    # A file name has at most 255 bytes.
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{zlib.crc32(name.encode()):08x}"


def proposal_name(number: int) -> str:
    """Name the folder of a search's trial by its number, which counts from 0."""
    return f"{number:04d}"


def rounded(value: Any, range_: Sequence[Any]) -> Any:
    """Round a suggested number to `DIGITS` digits, finer in a narrow range."""
    kind, *values = range_
    if kind == INT_UNIFORM:
        return value
    low, high = values
    scale = min(abs(value) or high - low, high - low)
    if scale > 0:
        value = round(value, DIGITS - 1 - math.floor(math.log10(scale)))
    return min(max(value, low), high)


def stopped_early(proposals: Sequence[Proposal]) -> set[str]:
    """Return the names of the trials that were stopped because others were better."""
    return {
        proposal_name(number)
        for number, proposal in enumerate(proposals)
        if proposal.stopped_early
    }


def default_path(config: Mapping[str, Any]) -> Path:
    """Return ``sweeps/<date-time>-<env or task>`` for a new sweep of such runs."""
    label = short_name((config.get("env") or config["task"])["name"])
    return Path("sweeps") / dated(label)


def _validate_inside(key: str, value: Any, range_: Sequence[Any]) -> None:
    """Reject a value outside its range, since the name of a class would be imported."""
    kind, *values = range_
    if kind != CHOICE:
        number: type = int if kind == INT_UNIFORM else float
        low, high = values
        check_value(key, value, Annotated[number, Field(ge=low, le=high)])
    # As text, 1 is neither 1.0 nor true.
    elif json.dumps(value) not in map(json.dumps, values):
        choices = ", ".join(map(show, values))
        raise InputError(f"{key}: expected one of {choices}, got {show(value)}")


def _text_in_name(value: Any) -> str:
    """Return a value as it stands in the name of a folder."""
    if not isinstance(value, str):
        return quote(_label(value), safe="=,+:[]")
    with suppress(ValueError):
        json.loads(value)
        value = json.dumps(value)
    return quote(value, safe="+:[]")


def _label(value: Any) -> str:
    is_text = isinstance(value, str)
    return value if is_text else json.dumps(value, separators=(",", ":"))


def _cell(value: Any) -> Any:
    """Format a swept value for the table: JSON, except for numbers and plain text."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return value if numeric else _label(value)


def _value(text: str) -> Any:
    if text in ("null", "true", "false"):
        return json.loads(text)
    if NUMBER.fullmatch(text or "nan"):
        return int(text) if text.lstrip("-").isdigit() else float(text or "nan")
    return text
