"""Heat map of occlusion in training and in tests (AttentionNeuron, Figure 5)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_pool.evaluation.cases import label
from marl_pool.evaluation.results import CLEAN, TRAINED
from marl_pool.evaluation.standalone import new_folder_for
from marl_pool.utils.atomic import make_folder
from marl_pool.utils.errors import InputError
from marl_pool.utils.plotting import (
    INK,
    figure_style,
    has_matplotlib,
    new_figure,
    save_png,
)
from marl_pool.utils.tables import write_csv

OCCLUDE = "occlude"
ROW = ("name", "severities")
"""Keys of a suite's entry that are not options."""


class HeatMapCell(NamedTuple):
    """Returns of a run by the fractions of tokens missing in training and test."""

    run: str
    trained: str
    tested: float
    episodes: int
    mean: float
    std: float


def occluded_in_training(config: Mapping[str, Any]) -> float | list[float]:
    """Return the fraction of tokens missing in a run's training, or its bounds."""
    perturbation = config.get("perturbation") or {}
    if perturbation.get("name") != OCCLUDE:
        return 0.0
    severity = perturbation["severity"]
    bounds = (config.get("clone") or {}).get("severities") or severity
    return bounds if isinstance(bounds, list) else float(severity)


def has_occlusion(perturbations: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if an evaluation of these perturbations has rows of a heat map."""
    return any(
        entry["name"] == OCCLUDE
        and label(OCCLUDE, {k: v for k, v in entry.items() if k not in ROW}) == OCCLUDE
        for entry in perturbations
    )


def compare(documents: Sequence[Path], out: str | None) -> list[Path]:
    """Write table and heat map of several evaluations, and return their paths.

    Args:
        documents: ``results.json`` of each.
        out: a new folder; None for one in ``evaluations/``.

    Raises:
        InputError: an evaluation without occlusion, or the folder exists.
    """
    cells = cells_of(documents)
    folder = new_folder_for("occlusion") if out is None else Path(out)
    if folder.exists():
        raise InputError(f"{folder} exists; choose another --out")
    make_folder(folder)
    table, picture = folder / "occlusion.csv", folder / "occlusion.png"
    write_csv(table, HeatMapCell._fields, (cell._asdict() for cell in cells))
    if not has_matplotlib():
        return [table]
    draw_heat_map(picture, cells)
    return [table, picture]


def cells_of(documents: Sequence[Path]) -> list[HeatMapCell]:
    """Read the cells from evaluations' ``results.json``.

    A clean row counts as occlusion by 0. Rows are those of the deterministic policy of
    the first group that was trained.

    Raises:
        InputError: an evaluation without occlusion.
    """
    cells: list[HeatMapCell] = []
    for document in documents:
        # Read the rows of occlusion and of the unperturbed environment.
        content = json.loads(document.read_text(encoding="utf-8"))
        rows = [row for row in content["results"] if _counts(row)]
        if not any(row["perturbation"] == OCCLUDE for row in rows):
            raise InputError(
                f"{document}: expected rows of the perturbation {OCCLUDE}, got none"
            )
        # Make a cell for each severity of the first group.
        trained = _words(content["occluded_in_training"])
        numbers = ("severity", "episodes", "mean", "std")
        cells += [
            HeatMapCell(content["run"], trained, *(row[key] for key in numbers))
            for row in rows
            if row["group"] == rows[0]["group"]
        ]
    return cells


@figure_style()
def draw_heat_map(path: Path, cells: Sequence[HeatMapCell]) -> None:
    """Draw a row for each run, by occlusion in training, and a column for each test.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Figure 5.
    """
    # Arrange the means by run and severity.
    runs = sorted({(cell.trained, cell.run) for cell in cells}, key=_order)
    tests = sorted({cell.tested for cell in cells})
    means = np.full((len(runs), len(tests)), np.nan)
    for cell in cells:
        row = runs.index((cell.trained, cell.run))
        means[row, tests.index(cell.tested)] = cell.mean
    # Draw the map, and the mean in each cell.
    figure = new_figure(1.6 + 0.8 * len(tests) + 1.2, 1.4 + 0.55 * len(runs))
    axes = figure.subplots()
    image = axes.imshow(means, aspect="auto")
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    center: dict[str, Any] = {"ha": "center", "va": "center"}
    for (row, column), mean in np.ndenumerate(means):
        if not np.isnan(mean):
            # Keep the text readable on dark cells.
            color = "white" if mean < (low + high) / 2 else INK
            axes.text(column, row, f"{mean:.4g}", color=color, **center)
    axes.set_xticks(range(len(tests)), [f"{fraction:.0%}" for fraction in tests])
    axes.set_yticks(range(len(runs)), [trained for trained, _ in runs])
    axes.set_xlabel("missing in the test")
    axes.set_ylabel("missing in training")
    figure.colorbar(image, ax=axes, label="mean return")
    save_png(figure, path)


def _counts(row: Mapping[str, Any]) -> bool:
    plain = row["policy"] == TRAINED and not row["stochastic"] and not row["fixed"]
    known = row["label"] in (CLEAN, OCCLUDE)
    return plain and known and not row["missing"]


def _order(row: tuple[str, str]) -> tuple[list[float], str]:
    """Sort key: the fractions that `_words` wrote, then the name."""
    trained, run = row
    return [float(fraction.rstrip("%")) for fraction in trained.split(" to ")], run


def _words(fraction: float | list[float]) -> str:
    if isinstance(fraction, list):
        low, high = fraction
        return f"{low:.0%} to {high:.0%}"
    return f"{fraction:.0%}"
