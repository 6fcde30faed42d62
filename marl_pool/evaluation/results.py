"""The numbers of an evaluation: one record a condition; as CSV, JSON and a table."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marl_pool.utils import tables
from marl_pool.utils.atomic import new_binary_file, new_file
from marl_pool.utils.manifest import sealed_json
from marl_pool.utils.reading import read_npz
from marl_pool.utils.text import printable

CLEAN, WORLD = "clean", "world"
TRAINED = "trained"
ONLY = "this policy only"
"""What intervals over episodes hold for: other training seeds may do otherwise."""
NAN = math.nan
TABLE, DOCUMENT, RETURNS = "results.csv", "results.json", "returns.npz"
CURVES, ROWS = "robustness.png", "rows.png"
REGRESSION, LATENTS = "regression.csv", "latents.png"
CODES, PATCHES = "codes.png", "patches.png"
NAMES = (
    *(TABLE, DOCUMENT, RETURNS, CURVES, ROWS),
    *(REGRESSION, LATENTS, CODES, PATCHES),
)
"""What an evaluation may write."""


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
    """Its name; ``"clean"``, or ``"world"`` for another world."""
    label: str
    """The name and the options that differ from its defaults; or the world's label."""
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
    world: dict[str, Any] = field(default_factory=dict)
    """Options of the env that differ in another world."""
    published: float = NAN
    """The mean that a paper has for the same."""
    published_std: float = NAN
    """Standard deviation over the paper's episodes."""
    score: float = NAN
    """(mean - random's) / (heuristic's - random's) in the same unperturbed world."""
    score_low: float = NAN
    score_high: float = NAN

    @property
    def perturbed(self) -> bool:
        """Whether there was a perturbation."""
        return self.perturbation not in (CLEAN, WORLD)

    @property
    def who(self) -> str:
        """The policy in words."""
        who = f"{self.policy}, sampled" if self.stochastic else self.policy
        return f"fixed, beside {who}" if self.fixed else who


@dataclass(frozen=True)
class Area:
    """One number for a perturbation's ladder of severities.

    The area under the score over severity, from the clean episodes at 0 to the
    ladder's end, divided by its length: the mean score on the way. Intervals are as in
    `Result`.
    """

    group: str
    policy: str
    stochastic: bool
    perturbation: str
    label: str
    options: dict[str, Any]
    severities: list[float]
    """The rungs, 0 among them."""
    area: float = NAN
    """NaN where a rung could not be measured, or no score is defined."""
    area_low: float = NAN
    area_high: float = NAN


class Files:
    """Names for the files of one evaluation that no file has.

    They are ``names``, or where one of them exists all with the same number:
    ``results-2.csv`` and so on.

    Args:
        folder: where they are to be.
        names: of the files.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self.folder, self.number = folder, 1
        while any(os.path.lexists(self.path(name)) for name in names):
            self.number += 1

    def path(self, name: str) -> Path:
        """The path of one of the names."""
        if self.number == 1:
            return self.folder / name
        stem, suffix = Path(name).stem, Path(name).suffix
        return self.folder / f"{stem}-{self.number}{suffix}"


def write_csv(path: Path, results: Iterable[Result], about: Mapping[str, Any]) -> None:
    """Write a row for each result; what could not be measured stays empty.

    Args:
        path: of the file.
        results: the rows.
        about: what holds for all of them, appended to each row; mappings as JSON.
    """
    rows = [{**asdict(result), **about} for result in results]
    lines = ({key: _cell(value) for key, value in row.items()} for row in rows)
    tables.write_csv(path, list(rows[0]), lines)


def write_json(
    path: Path,
    results: Iterable[Result],
    about: Mapping[str, Any],
    areas: Iterable[Area] = (),
) -> None:
    """Write ``{**about, "results": […], "areas": […]}``; what is missing is null.

    Last comes ``"sha256"`` of the others, by which a damaged file is found.
    """
    content = {**about, "results": _rows(results), "areas": _rows(areas)}
    with new_file(path) as out:
        json.dump(sealed_json(content), out, indent=2, allow_nan=False)
        out.write("\n")


def write_returns(path: Path, returns: np.ndarray) -> None:
    """Write the episodes' returns as ``returns`` of an npz file.

    Args:
        path: of the file.
        returns: ``(rows, episodes)`` float64, in the order of the results; column j is
            the same world in every row. NaN where nothing was measured.
    """
    with new_binary_file(path) as out:
        np.savez_compressed(out, returns=returns)


def read_returns(path: Path) -> np.ndarray:
    """Read what `write_returns` wrote; nothing in it is unpickled."""
    return read_npz(path)["returns"]


def _rows(records: Iterable["Result | Area"]) -> list[dict[str, Any]]:
    return [
        {key: _finite(value) for key, value in asdict(record).items()}
        for record in records
    ]


def print_table(results: Sequence[Result], title: str) -> None:
    """Show the results on screen."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    groups = {result.group for result in results}
    loses = any(result.self_query_lost for result in results)
    compared = any(not math.isnan(result.published) for result in results)
    table = Table(
        title=Text(printable(title)),
        title_justify="left",
        caption=f"95 %: over episodes, so for {ONLY}",
        caption_justify="left",
    )
    for name in ("policy", "perturbation"):
        table.add_column(name)
    for name in ("severity", "mean return", "95 %", "std", "IQM", "drop", "95 %"):
        table.add_column(name, justify="right")
    if loses:
        table.add_column("self lost", justify="right")
    if compared:
        table.add_column("published", justify="right")
    for result in results:
        prefix = f"{result.group}: " if len(groups) > 1 else ""
        cells = [prefix + result.who, result.label, *_numbers(result)]
        if loses:
            cells.append(f"{result.self_query_lost or 0:.0%}")
        if compared:
            cells.append(_published(result))
        table.add_row(*cells)
    console = Console()
    # A pipe has no width of its own, and 80 columns would break the rows.
    console.width = console.width if console.is_terminal else 140 + 20 * compared
    console.print(table)
    for gap, labels in gaps_of(results).items():
        console.print(f"not measured: {', '.join(labels)}: {gap}", markup=False)


def print_areas(areas: Sequence[Area]) -> None:
    """Show the number of each ladder of several rungs, if any is defined."""
    from rich.console import Console
    from rich.table import Table

    shown = [a for a in areas if len(a.severities) > 2 and not math.isnan(a.area)]
    if not shown:
        return
    groups = {area.group for area in shown}
    table = Table(
        title="mean score over severity: 0 is random, 1 the heuristic, clean",
        title_justify="left",
        caption=f"95 %: over episodes, so for {ONLY}",
        caption_justify="left",
    )
    for name in ("policy", "perturbation"):
        table.add_column(name)
    for name in ("up to", "area", "95 %"):
        table.add_column(name, justify="right")
    for area in shown:
        prefix = f"{area.group}: " if len(groups) > 1 else ""
        who = f"{area.policy}, sampled" if area.stochastic else area.policy
        interval = f"{area.area_low:.3f} to {area.area_high:.3f}"
        table.add_row(
            prefix + who,
            area.label,
            f"{area.severities[-1]:g}",
            f"{area.area:.3f}",
            interval,
        )
    console = Console()
    console.width = console.width if console.is_terminal else 140
    console.print(table)


def gaps_of(results: Iterable[Result]) -> dict[str, list[str]]:
    """The reasons of gaps, each with the labels that it is one for."""
    gaps: dict[str, dict[str, None]] = {}
    for result in results:
        if result.gap:
            gaps.setdefault(result.gap, {})[result.label] = None
    return {gap: list(labels) for gap, labels in gaps.items()}


def _published(result: Result) -> str:
    if math.isnan(result.published):
        return ""
    return f"{result.published:g} ± {result.published_std:g}"


def _numbers(result: Result) -> list[str]:
    severity = f"{result.severity:g}" if result.perturbed else ""
    if result.gap:
        return [severity, "not measured", *[""] * 5]
    paired = not math.isnan(result.drop)
    return [
        severity,
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
