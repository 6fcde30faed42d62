"""The evaluations that a run holds: read, checked, and put together as one."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from marl_pool.evaluation.results import (
    CLEAN,
    DOCUMENT,
    RETURNS,
    TRAINED,
    read_returns,
)
from marl_pool.manifest import is_intact_json
from marl_pool.reading import read_json
from marl_pool.runs import Run

SUBJECT = ("iteration", "config_digest")
"""What tells, beside the protocol, whom an evaluation measured."""
CONDITION = ("group", "policy", "stochastic", "perturbation", "label", "severity")
"""What tells a row from the others of an evaluation, beside its options."""
AS_TRAINED = "as trained"
Kinds = Mapping[str, tuple[type, ...]]
ABOUT: Kinds = {
    "seed": (int,),
    "episodes": (int,),
    "checkpoint": (int, str),
    "env": (dict,),
    "changed": (dict,),
    "rescale_codes": (bool,),
}
ROW: Kinds = {
    **dict.fromkeys(("group", "policy", "perturbation", "label", "gap"), (str,)),
    **dict.fromkeys(("stochastic", "fixed"), (bool,)),
    **dict.fromkeys(("options", "world"), (dict,)),
    "severity": (int, float),
}
"""Keys that a document and its rows must have, and the types of their values."""
DEFAULTS: dict[str, Any] = {"changed": {}, "rescale_codes": False}
"""What holds where an earlier version did not say so."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that a run holds, or several of them as one.

    Attributes:
        path: of its ``results.json``; of several, that of the newest.
        about: what holds for all rows.
        rows: the results.
        returns: ``(rows, episodes)``, column j is the same world in every row.
    """

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    returns: np.ndarray
    earlier: tuple[Path, ...] = ()
    """Of several, those that have rows of their own here."""

    @property
    def protocol(self) -> dict[str, Any]:
        """What evaluations that are compared share, beside what they measure.

        The checkpoint is the kind that was asked for, such as "best": which iteration
        that is differs between runs.
        """
        return {
            **{key: self.about[key] for key in ("seed", "episodes")},
            "env": self.about["changed"] or AS_TRAINED,
            "checkpoint": self.about["checkpoint"],
            "rescale_codes": self.about["rescale_codes"],
        }

    @property
    def learned(self) -> list[str]:
        """The groups of agents whose policies were trained."""
        rows = (row for row in self.rows if _is_trained(row))
        return list(dict.fromkeys(row["group"] for row in rows))

    def with_rows_of(self, other: "Evaluation") -> "Evaluation":
        """Add the rows that this one lacks, if both measured the same policy alike.

        The episodes are those of the same worlds, so that they are paired as well as
        if all had been measured at once.
        """
        subjects = [
            {**one.protocol, **{key: one.about.get(key) for key in SUBJECT}}
            for one in (self, other)
        ]
        known = {_condition(row) for row in self.rows}
        new = [i for i, row in enumerate(other.rows) if _condition(row) not in known]
        if subjects[0] != subjects[1] or not new:
            return self
        return replace(
            self,
            rows=[*self.rows, *(other.rows[i] for i in new)],
            returns=np.concatenate([self.returns, other.returns[new]]),
            earlier=(*self.earlier, other.path),
        )

    @property
    def written(self) -> str:
        """When, in UTC."""
        moment = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return f"{moment:%Y-%m-%d %H:%M}"


def newest(run: Path, name: str) -> list[Path]:
    """The files ``NAME``, ``NAME-2`` … of a run's evaluations, the newest first."""
    stem, suffix = Path(name).stem, Path(name).suffix
    numbered = {
        int(path.stem.removeprefix(stem).removeprefix("-") or 1): path
        for path in (run / "evaluation").glob(f"{stem}*{suffix}")
        if (path.stem.removeprefix(stem).removeprefix("-") or "1").isdecimal()
    }
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def evaluation_of(run: Run) -> Evaluation | str:
    """The complete evaluations of a run as one, or why there is none."""
    documents = newest(run.path, DOCUMENT)
    read = [_read(path) for path in documents]
    found = [own for own in read if isinstance(own, Evaluation)]
    if found:
        latest, *rest = found
        for other in rest:
            latest = latest.with_rows_of(other)
        return latest
    if documents:
        reason = f"{documents[0].name}: {read[0]}"
        return f"no evaluation with each episode's return ({reason}); make one"
    return "not evaluated yet; do so by"


def document(path: Path) -> dict[str, Any] | str:
    """Read a JSON object, or say why there is none."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError):
        return "it cannot be read as JSON"
    return content if isinstance(content, dict) else "expected a JSON object"


def changed_since(content: Mapping[str, Any]) -> str:
    """Why what looks right cannot be trusted; empty if it can."""
    if is_intact_json(content):
        return ""
    return "it has changed since it was written: its checksum differs"


def _read(path: Path) -> Evaluation | str:
    """Read an evaluation; why not, for one that is not whole or of an early version."""
    content = document(path)
    if isinstance(content, str):
        return content
    about = {**DEFAULTS, **content}
    returns = path.with_name(path.name.replace(Path(DOCUMENT).stem, Path(RETURNS).stem))
    returns = returns.with_suffix(Path(RETURNS).suffix)
    rows = about.pop("results", None)
    lacking = lacks(about, ABOUT)
    if lacking or not isinstance(rows, list):
        return f"it has no {lacking or 'results'} as expected"
    if not rows or any(not isinstance(row, dict) or lacks(row, ROW) for row in rows):
        return "its results are not rows as expected"
    if not returns.is_file():
        return f"there is no {returns.name}"
    try:
        table = read_returns(returns)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error):
        # A TypeError comes of a file that holds an array and not several by name.
        return f"{returns.name} cannot be read"
    # The checksum last: what is wrong in itself is said more exactly.
    flaw = _flaw(rows, table, about["episodes"]) or changed_since(content)
    return flaw or Evaluation(path, about, rows, table)


def lacks(content: Mapping[str, Any], kinds: Kinds) -> str:
    """The first key that is missing, or has a value of another type."""
    return next((k for k, own in kinds.items() if type(content.get(k)) not in own), "")


def _flaw(rows: list[dict[str, Any]], table: np.ndarray, episodes: int) -> str:
    """Why rows and returns do not belong together; empty if they do."""
    if table.shape != (len(rows), episodes) or table.dtype.kind != "f" or not episodes:
        return (
            f"expected returns of {len(rows)} rows and {episodes} episodes, got "
            f"{table.dtype} of shape {table.shape}"
        )
    if not all(0 <= row["severity"] <= 1 for row in rows):
        return "a severity is not in [0, 1]"
    whole = np.isfinite(table).all(1)
    if any(not row["gap"] and not own for row, own in zip(rows, whole, strict=True)):
        return "a return is not a finite number"
    learned = {row["group"] for row in rows if _is_trained(row)}
    clean = {
        row["group"]
        for row in rows
        if _is_trained(row) and row["perturbation"] == CLEAN and not row["gap"]
    }
    if not learned or learned != clean:
        return "a trained policy's unperturbed episodes are missing"
    return ""


def _is_trained(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a deterministic policy that was trained."""
    plain = not row["stochastic"] and not row["fixed"]
    return bool(row["policy"] == TRAINED and plain)


def _condition(row: Mapping[str, Any]) -> str:
    """Of a row: who played, and what was done to what they saw, or where."""
    told = {key: row[key] for key in CONDITION}
    rest = {key: row[key] for key in ("options", "world")}
    return json.dumps({**told, **rest}, sort_keys=True)
