"""Diagnoses as CSV, as JSON and as a table on screen."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from marl_pool.evaluation.diagnosis.records import NAN, Diagnosis
from marl_pool.utils import tables
from marl_pool.utils.atomic import new_file
from marl_pool.utils.manifest import sealed_json
from marl_pool.utils.text import printable

TABLE, DOCUMENT, PLOT = "diagnosis.csv", "diagnosis.json", "diagnosis.png"
NAMES = (TABLE, DOCUMENT, PLOT)
"""Files of a diagnosis."""
Named = Sequence[tuple[str, Diagnosis]]
"""Diagnoses with their names in tables and figures."""


def to_plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Convert a diagnosis to plain data, with None for NaN."""
    return tables.without_nan(asdict(diagnosis))


def from_plain(values: Mapping[str, Any]) -> Diagnosis:
    """Invert `to_plain`; other keys are ignored."""
    known: dict[str, Any] = {item.name: values[item.name] for item in fields(Diagnosis)}
    for key, value in known.items():
        known[key] = NAN if value is None else value
    return Diagnosis(**known)


def write_json(
    path: Path, rows: Iterable[Mapping[str, Any]], about: Mapping[str, Any]
) -> None:
    """Write ``{**about, "rows": […]}`` and a checksum under ``"sha256"``."""
    content = sealed_json({**about, "rows": list(rows)})
    with new_file(path) as out:
        json.dump(content, out, indent=2, allow_nan=False)
        out.write("\n")


def _number(value: float, digits: int = 3) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def _percent(fraction: float) -> str:
    return "" if math.isnan(fraction) else f"{fraction:.0%}"


Format = Callable[[Diagnosis], str]

COMMON: dict[str, Format] = {
    "k of N": lambda row: f"{row.num_signal:.3g} of {row.num_tokens:.3g}",
    "loss": lambda row: _number(row.signal_loss),
    "excess": lambda row: _number(row.excess),
    "95 %": lambda row: _interval(row.excess_low, row.excess_high),
    "of mean": lambda row: _number(row.mean_excess),
    "w signal": lambda row: _number(row.signal_weight),
    "k/N": lambda row: _number(row.uniform_weight),
    "w self": lambda row: _number(row.self_weight),
}
SCORED: dict[str, Format] = {
    "ε_s": lambda row: _number(row.signal_width, 2),
    "ε_η": lambda row: _number(row.noise_width, 2),
    "M": lambda row: _number(row.margin, 2),
    "D": lambda row: _number(row.distance, 2),
    "M > 0": lambda row: _percent(row.margin_positive),
    "U_s-L_s": lambda row: _number(row.signal_bound_width),
    "U_η-L_η": lambda row: _number(row.noise_bound_width),
    "outside": lambda row: f"{row.violations} of {row.checked:,}",
}
"""Columns of heads with relation scores."""


def print_table(named: Named, title: str) -> None:
    """Print diagnoses as a table, and the reasons for missing ones below it."""
    scored = any(row.checked for _, row in named)
    columns = {**COMMON, **(SCORED if scored else {})}
    lines = [[name, *_cells(row, columns)] for name, row in named]
    tables.print_table(["", *columns], lines, title=title, width=200)
    for name, row in named:
        if row.missing:
            print(f"not measured: {printable(name)}: {row.missing}")


def _cells(row: Diagnosis, columns: Mapping[str, Format]) -> list[str]:
    if row.missing:
        return ["not measured"]
    blank = () if row.checked else SCORED
    return ["" if name in blank else text(row) for name, text in columns.items()]
