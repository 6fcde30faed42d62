"""The numbers of an evaluation: one record a condition; as CSV, JSON and a table."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from marl_pool.atomic import new_file

CLEAN = "clean"
TRAINED = "trained"
NAN = math.nan


@dataclass(frozen=True)
class Result:
    """Returns of one group of agents under one condition.

    Numbers are NaN where they could not be measured. Intervals are 95 % percentile
    bootstrap intervals over episodes.
    """

    group: str
    policy: str
    """``"trained"``, ``"random"`` or ``"heuristic"``."""
    stochastic: bool
    """Actions were sampled, not the most likely ones."""
    perturbation: str
    """Its name, or ``"clean"``."""
    label: str
    """The name and the options that differ from its defaults."""
    severity: float
    options: dict[str, Any] = field(default_factory=dict)
    """All options given."""
    episodes: int = 0
    mean: float = NAN
    mean_low: float = NAN
    mean_high: float = NAN
    std: float = NAN
    iqm: float = NAN
    """Interquartile mean."""
    iqm_low: float = NAN
    iqm_high: float = NAN
    drop: float = NAN
    """Mean of clean minus perturbed return, paired by world."""
    drop_low: float = NAN
    drop_high: float = NAN
    self_query_lost: float | None = None
    """Share of decisions in which AdaPool's self token was padded."""
    gap: str = ""
    """Why there are no numbers; empty where there are."""
    fixed: bool = False
    """The group did not learn: it plays as in training, beside ``policy``."""

    @property
    def who(self) -> str:
        """The policy in words."""
        who = f"{self.policy}, sampled" if self.stochastic else self.policy
        return f"fixed, beside {who}" if self.fixed else who


def new_paths(folder: Path) -> tuple[Path, Path, Path]:
    """Paths for the CSV, the JSON and the plot that no file has.

    They are ``results.csv``, ``results.json`` and ``robustness.png``, or where one of
    them exists all three with the same number: ``results-2.csv`` and so on.
    """
    names, number = ("results.csv", "results.json", "robustness.png"), 1
    paths = [folder / name for name in names]
    while any(path.exists() for path in paths):
        number += 1
        paths = [
            folder / f"{Path(name).stem}-{number}{Path(name).suffix}" for name in names
        ]
    return paths[0], paths[1], paths[2]


def write_csv(path: Path, results: Iterable[Result], about: Mapping[str, Any]) -> None:
    """Write a row for each result; what could not be measured stays empty.

    Args:
        path: of the file.
        results: the rows.
        about: what holds for all of them, appended to each row; mappings as JSON.
    """
    rows = [{**asdict(result), **about} for result in results]
    with new_file(path) as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in r.items()} for r in rows)


def write_json(path: Path, results: Iterable[Result], about: Mapping[str, Any]) -> None:
    """Write ``{**about, "results": […]}``; what could not be measured is null."""
    rows = [
        {key: _finite(value) for key, value in asdict(result).items()}
        for result in results
    ]
    with new_file(path) as out:
        json.dump({**about, "results": rows}, out, indent=2, allow_nan=False)
        out.write("\n")


def print_table(results: Sequence[Result], title: str) -> None:
    """Show the results on screen."""
    from rich.console import Console
    from rich.table import Table

    groups = {result.group for result in results}
    loses = any(result.self_query_lost for result in results)
    table = Table(title=title, title_justify="left")
    for name in ("policy", "perturbation"):
        table.add_column(name)
    for name in ("severity", "mean return", "95 %", "std", "IQM", "drop", "95 %"):
        table.add_column(name, justify="right")
    if loses:
        table.add_column("self lost", justify="right")
    for result in results:
        prefix = f"{result.group}: " if len(groups) > 1 else ""
        cells = [prefix + result.who, result.label, *_numbers(result)]
        lost = [f"{result.self_query_lost or 0:.0%}"] if loses else []
        table.add_row(*cells, *lost)
    console = Console()
    # A pipe has no width of its own, and 80 columns would break the rows.
    console.width = console.width if console.is_terminal else 140
    console.print(table)
    for result in results:
        if result.gap:
            console.print(f"not measured: {result.label}: {result.gap}", markup=False)


def _numbers(result: Result) -> list[str]:
    if result.gap:
        return [f"{result.severity:g}", "not measured", *[""] * 5]
    paired = not math.isnan(result.drop)
    return [
        "" if result.perturbation == CLEAN else f"{result.severity:g}",
        f"{result.mean:.3f}",
        f"{result.mean_low:.3f} to {result.mean_high:.3f}",
        f"{result.std:.3f}",
        f"{result.iqm:.3f}",
        f"{result.drop:.3f}" if paired else "",
        f"{result.drop_low:.3f} to {result.drop_high:.3f}" if paired else "",
    ]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _cell(value: Any) -> Any:
    value = _finite(value)
    return json.dumps(value) if isinstance(value, dict) else value
