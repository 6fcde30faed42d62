"""What `marl-pool diagnose` found of a run: read, and checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl_pool.evaluation.diagnosis import ALL
from marl_pool.evaluation.diagnosis_files import DOCUMENT
from marl_pool.evaluation.report.evaluations import (
    AS_TRAINED,
    DEFAULTS,
    Kinds,
    changed_since,
    document,
    lacks,
    newest,
)
from marl_pool.runs import Run

SUMMED = ("checked", "violations")
"""Counts: of several heads or runs the sum says more than the mean."""
ABOUT: Kinds = {"seed": (int,), "checkpoint": (int, str), "changed": (dict,)}


@dataclass(frozen=True)
class Diagnosed:
    """A diagnosis that a run holds.

    Attributes:
        path: of its ``diagnosis.json``.
        about: what holds for all rows.
        rows: the diagnoses.
    """

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def protocol(self) -> dict[str, Any]:
        """What it shares with the evaluations that it stands beside."""
        chosen = {key: self.about[key] for key in ("seed", "checkpoint")}
        return {**chosen, "env": self.about["changed"] or AS_TRAINED}

    @property
    def groups(self) -> list[str]:
        """The groups of agents that it has rows of."""
        return list(dict.fromkeys(row["group"] for row in self.rows))

    def numbers(self, group: str) -> dict[str, float] | str:
        """The numbers of a group by name, or why there are none.

        Of several heads without a row of all of them: means, or sums of `SUMMED`.
        """
        own = [row for row in self.rows if row["group"] == group]
        if not own:
            return f"its diagnosis has no group {group!r}"
        # A row for all heads together stands beside those of each head.
        rows = [row for row in own if row.get("head") == ALL] or own
        reason = next((row["gap"] for row in rows if row.get("gap")), "")
        if reason:
            return str(reason)
        found: dict[str, list[float]] = {}
        for row in rows:
            for column, value in row.items():
                if _is_number(value):
                    found.setdefault(column, []).append(value)
        return {column: _joined(column, own) for column, own in found.items()}


def _joined(column: str, values: list[float]) -> float:
    return sum(values) / (1 if column in SUMMED else len(values))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def diagnosis_of(run: Run) -> Diagnosed | str:
    """The newest diagnosis of a run that is whole.

    Returns:
        In place of one, why there is none; empty if none was made.
    """
    found = [_read(path) for path in newest(run.path, DOCUMENT)]
    whole = (one for one in found if isinstance(one, Diagnosed))
    return next(whole, next(iter(found), ""))


def _read(path: Path) -> Diagnosed | str:
    content = document(path)
    if isinstance(content, str):
        return f"{path.name}: {content}"
    about = dict(content)
    rows = about.pop("rows", None)
    if not isinstance(rows, list) or not rows or not all(map(_is_row, rows)):
        return f"{path.name} has no rows as expected"
    about = {**DEFAULTS, **about}
    lacking = lacks(about, ABOUT)
    if lacking:
        return f"{path.name} has no {lacking} as expected"
    if changed := changed_since(content):
        return f"{path.name}: {changed}"
    return Diagnosed(path, about, rows)


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and isinstance(row.get("group"), str)
