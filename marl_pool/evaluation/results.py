"""Rows of an evaluation, as CSV, JSON and a table on screen."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marl_pool.evaluation.statistics.intervals import Interval
from marl_pool.files import atomic, tables
from marl_pool.files.manifest import sealed_json
from marl_pool.files.reading import read_npz
from marl_pool.utils.text import printable

CLEAN, TRANSFER = "clean", "transfer"
"""Values of `Result.perturbation` of unperturbed rows."""
TRAINED = "trained"
ONLY = "this policy only"
"""Scope of intervals over episodes; other training seeds may differ."""
NAN = math.nan
OTHERS = {"drop_after": "drop after end", "worst_drop": "worst drop"}
"""Columns of the table on screen that only some evaluations have."""
TABLE, DOCUMENT, RETURNS = "results.csv", "results.json", "returns.npz"
CURVES, ROWS = "robustness.png", "rows.png"
NAMES = (TABLE, DOCUMENT, RETURNS, CURVES, ROWS)
"""Files that an evaluation may write."""


@dataclass(frozen=True)
class Result:
    """Returns of one group of agents under one condition.

    Numbers are NaN where they could not be measured. Intervals (``_low``, ``_high``)
    are 95 % percentile bootstrap intervals over episodes.
    """

    group: str
    policy: str
    """``"trained"`` for the policy that is measured; ``"random"``, ``"heuristic"``."""
    stochastic: bool
    """Actions were sampled."""
    perturbation: str
    """Name of the perturbation; ``"clean"``, or ``"transfer"`` for another env."""
    label: str
    """Name with the options that differ from the defaults; or the other env's label."""
    severity: float
    options: dict[str, Any] = field(default_factory=dict)
    """All options that were set."""
    episodes: int = 0
    mean: float = NAN
    mean_low: float = NAN
    mean_high: float = NAN
    std: float = NAN
    """Sample standard deviation (n - 1); NaN for a single episode."""
    iqm: float = NAN
    """Interquartile mean."""
    iqm_low: float = NAN
    iqm_high: float = NAN
    drop: float = NAN
    """Mean of clean minus perturbed return, paired by environment."""
    drop_low: float = NAN
    drop_high: float = NAN
    missing: str = ""
    """Reason why there are no numbers; empty if there are."""
    fixed: bool = False
    """The group was not trained; it plays as in training, beside ``policy``."""
    transfer_env: dict[str, Any] = field(default_factory=dict)
    """Options of the env that differ in another environment."""
    score: float = NAN
    """(mean - random) / (heuristic - random), in the same unperturbed environment."""
    score_low: float = NAN
    score_high: float = NAN
    drop_after: float = NAN
    """The part of ``drop`` from the perturbation's ``end`` on, during recovery."""
    drop_after_low: float = NAN
    drop_after_high: float = NAN
    worst: float = NAN
    """Mean over episodes of the lowest return under ``worst_of`` samples."""
    worst_low: float = NAN
    worst_high: float = NAN
    worst_drop: float = NAN
    """Mean of clean minus lowest return, paired by environment."""
    worst_drop_low: float = NAN
    worst_drop_high: float = NAN

    @property
    def perturbed(self) -> bool:
        """True if there was a perturbation."""
        return self.perturbation not in (CLEAN, TRANSFER)

    @property
    def policy_label(self) -> str:
        """The policy in words."""
        label = _in_words(self.policy, self.stochastic)
        return f"fixed, beside {label}" if self.fixed else label


@dataclass(frozen=True)
class SeverityAUC:
    """Area under the curve of score over severity, divided by the range of severity.

    This is the mean score from the clean episodes at severity 0 to the highest
    severity, by the trapezoidal rule. Intervals are as in `Result`.
    """

    group: str
    policy: str
    stochastic: bool
    perturbation: str
    label: str
    options: dict[str, Any]
    severities: list[float]
    """Severity levels, including 0."""
    auc: float = NAN
    """NaN if a level could not be measured, or no score is defined."""
    auc_low: float = NAN
    auc_high: float = NAN

    @property
    def policy_label(self) -> str:
        """The policy in words."""
        return _in_words(self.policy, self.stochastic)


def interval_of(row: Result | SeverityAUC, name: str) -> Interval:
    """Return a number of a row, such as ``"mean"`` or ``"auc"``, with its interval."""
    return Interval(*(getattr(row, f"{name}{end}") for end in ("", "_low", "_high")))


def _in_words(policy: str, stochastic: bool) -> str:
    return f"{policy}, sampled" if stochastic else policy


class Files:
    """Paths of an evaluation's files that do not exist yet.

    They are ``names``; if one of them exists, all get the same number:
    ``results-2.csv`` and so on.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self.folder = folder
        # Continue after the highest number, so that the newest evaluation has it.
        numbers = [0]
        for name in names:
            stem, _, suffix = name.rpartition(".")
            pattern = rf"{re.escape(stem)}(?:-([0-9]+))?\.{re.escape(suffix)}"
            matches = [re.fullmatch(pattern, path.name) for path in folder.glob("*")]
            numbers += [int(match[1] or 1) for match in matches if match]
        self.number = max(numbers) + 1

    def path(self, name: str) -> Path:
        """Return the path of a file with this evaluation's number."""
        path = self.folder / name
        numbered = path.with_stem(f"{path.stem}-{self.number}")
        return numbered if self.number > 1 else path

    def unused(self, name: str) -> Path:
        """Return a path for a file not among ``names``, with the next free number."""
        path = self.path(name)
        if os.path.lexists(path):
            path = Files(self.folder, (*NAMES, name)).path(name)
        return path


def write_csv(path: Path, results: Iterable[Result], record: Mapping[str, Any]) -> None:
    """Write a line for each result, with the other entries of ``record`` appended.

    Missing values are empty, mappings are JSON.
    """
    # A row that was not measured has 0 episodes, whatever the record says.
    rows = [
        tables.without_nan(row | {k: v for k, v in record.items() if k not in row})
        for row in map(asdict, results)
    ]
    tables.write_csv(path, list(rows[0]), rows)


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data with a checksum, ``"sha256"``, that reveals a damaged file."""
    atomic.write_json(path, sealed_json(content), indent=2, allow_nan=False)


def write_json(
    path: Path,
    results: Iterable[Result],
    record: Mapping[str, Any],
    aucs: Iterable[SeverityAUC] = (),
) -> None:
    """Write ``{**record, "results": […], "aucs": […]}``; missing values are null."""
    rows = [tables.without_nan(asdict(result)) for result in results]
    areas = [tables.without_nan(asdict(auc)) for auc in aucs]
    write_sealed(path, {**record, "results": rows, "aucs": areas})


def write_returns(path: Path, returns: np.ndarray) -> None:
    """Write the episodes' returns as ``returns`` of an npz file.

    They are ``(rows, episodes)`` float64, in the order of the results; column j is the
    same environment in every row. NaN where nothing was measured.
    """
    with atomic.new_binary_file(path) as out:
        np.savez_compressed(out, returns=returns)


def read_returns(path: Path) -> np.ndarray:
    """Read a file of `write_returns`, without unpickling anything."""
    return read_npz(path)["returns"]


def print_table(results: Sequence[Result], title: str) -> None:
    """Print the results as a table, then the reasons of missing ones."""
    columns = ["severity", "mean return", "95 %", "std", "IQM", "drop", "95 %"]
    # Leave out columns that this evaluation does not have.
    intervals = ["drop"]
    for name, words in OTHERS.items():
        if not all(math.isnan(getattr(result, name)) for result in results):
            columns += [words, "95 %"]
            intervals.append(name)
    rows = []
    for result, policy in zip(results, policies_in_words(results), strict=True):
        severity = f"{result.severity:g}" if result.perturbed else ""
        cells = [policy, result.label, severity]
        if result.missing:
            cells.append("not measured")
        else:
            cells += _interval(result, "mean")
            # A single episode has no standard deviation.
            std = "" if math.isnan(result.std) else f"{result.std:.3f}"
            cells += [std, f"{result.iqm:.3f}"]
            for name in intervals:
                cells += _interval(result, name)
        rows.append(cells)
    # A narrow terminal keeps return, standard deviation and drop.
    names = ["policy", "perturbation"]
    intervals_at = [k for k, name in enumerate([*names, *columns]) if name == "95 %"]
    drop_first = [len(names) + columns.index("IQM"), *reversed(intervals_at)]
    print_rows(title, names, columns, rows, drop_first)
    # Print each reason once, with all rows that it holds for.
    reasons: dict[str, dict[str, None]] = {}
    for result in results:
        if result.missing:
            reasons.setdefault(result.missing, {})[result.label] = None
    for reason, labels in reasons.items():
        print(printable(f"not measured: {', '.join(labels)}: {reason}"))


def print_aucs(aucs: Sequence[SeverityAUC]) -> None:
    """Print the AUC of each perturbation with several severities, if it is defined."""
    # A single severity besides 0 makes no curve.
    curves = [
        auc for auc in aucs if len(auc.severities) > 2 and not math.isnan(auc.auc)
    ]
    rows = [
        [policy, auc.label, f"{auc.severities[-1]:g}", *_interval(auc, "auc")]
        for auc, policy in zip(curves, policies_in_words(curves), strict=True)
    ]
    if rows:
        title = "mean score over severity: 0 is random, 1 the heuristic, clean"
        print_rows(title, ["policy", "perturbation"], ["up to", "AUC", "95 %"], rows)


def print_rows(
    title: str,
    left_columns: Sequence[str],
    right_columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    drop_first: Sequence[int] = (),
) -> None:
    """Print a table whose intervals are over episodes.

    The ``left_columns`` are aligned to the left, the ``right_columns`` to the right.
    For ``drop_first`` see `tables.print_table`.
    """
    tables.print_table(
        [*left_columns, *right_columns],
        rows,
        title=title,
        caption=f"95 %: over episodes, so for {ONLY}",
        num_names=len(left_columns),
        drop_first=drop_first,
    )


def policies_in_words(rows: "Sequence[Result | SeverityAUC]") -> list[str]:
    """Return the policies in words, with their groups if there are several."""
    several = len({row.group for row in rows}) > 1
    return [
        f"{row.group}: {row.policy_label}" if several else row.policy_label
        for row in rows
    ]


def _interval(result: "Result | SeverityAUC", name: str) -> list[str]:
    """Return the cells of a number and its interval, empty where it is missing."""
    value, low, high = interval_of(result, name)
    if math.isnan(value):
        return ["", ""]
    return [f"{value:z.3f}", "" if math.isnan(low) else f"{low:z.3f} to {high:z.3f}"]
