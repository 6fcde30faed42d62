"""The diagnosis of a run by `marl-pool diagnose`: read and validated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl_pool.evaluation.diagnosis.files import DOCUMENT
from marl_pool.evaluation.diagnosis.records import ALL
from marl_pool.evaluation.report.evaluations import (
    AS_TRAINED,
    DEFAULTS,
    Kinds,
    checksum_problem,
    missing_key,
    numbered_files,
    read_document,
)
from marl_pool.runs import Run

SUMMED = ("checked", "violations")
"""Counts, which are summed over heads and runs; other numbers are averaged."""
ABOUT: Kinds = {"seed": (int,), "checkpoint": (int, str), "changed": (dict,)}


@dataclass(frozen=True)
class Diagnosed:
    """A diagnosis of a run.

    Attributes:
        path: of its ``diagnosis.json``.
        about: values common to all rows.
        rows: the diagnoses.
    """

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def protocol(self) -> dict[str, Any]:
        """Settings that it shares with the evaluations on the same page."""
        chosen = {key: self.about[key] for key in ("seed", "checkpoint")}
        return {**chosen, "env": self.about["changed"] or AS_TRAINED}

    @property
    def groups(self) -> list[str]:
        """The groups of agents that were diagnosed."""
        return list(dict.fromkeys(row["group"] for row in self.rows))

    def numbers(self, group: str) -> dict[str, float] | str:
        """The numbers of a group by name, or the reason why there are none.

        A row for all heads takes precedence; without one, heads are averaged, and
        `SUMMED` columns summed.
        """
        own = [row for row in self.rows if row["group"] == group]
        if not own:
            return f"its diagnosis has no group {group!r}"
        rows = [row for row in own if row.get("head") == ALL] or own
        if reason := next((row["missing"] for row in rows if row.get("missing")), ""):
            return str(reason)
        found: dict[str, list[float]] = {}
        for row in rows:
            for column, value in row.items():
                if type(value) in (int, float) and math.isfinite(value):
                    found.setdefault(column, []).append(value)
        return {column: joined(column, values) for column, values in found.items()}


def joined(column: str, values: list[float]) -> float:
    """The sum of a `SUMMED` column, the mean of another one."""
    return sum(values) / (1 if column in SUMMED else len(values))


def diagnosis_of(run: Run) -> Diagnosed | str:
    """The newest complete diagnosis of a run.

    Returns:
        Without one, the reason; empty if the run was never diagnosed.
    """
    found = [_read(path) for path in numbered_files(run.path, DOCUMENT)]
    complete = (one for one in found if isinstance(one, Diagnosed))
    return next(complete, next(iter(found), ""))


def _read(path: Path) -> Diagnosed | str:
    content = read_document(path)
    if isinstance(content, str):
        return f"{path.name}: {content}"
    about = {**DEFAULTS, **content}
    rows = about.pop("rows", None)
    if not isinstance(rows, list) or not rows or not all(map(_is_row, rows)):
        return f"{path.name} has no rows as expected"
    if key := missing_key(about, ABOUT):
        return f"{path.name} has no {key} as expected"
    if problem := checksum_problem(content):
        return f"{path.name}: {problem}"
    return Diagnosed(path, about, rows)


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and isinstance(row.get("group"), str)
