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
"""What a diagnosis writes."""


def plain(row: Diagnosis) -> dict[str, Any]:
    """A row as plain data, in which what is not finite is None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(row).items()
    }


def from_plain(values: Mapping[str, Any]) -> Diagnosis:
    """Read what `plain` returned; other keys are passed over."""
    given = {item.name: values[item.name] for item in fields(Diagnosis)}
    numbers: dict[str, Any] = {k: NAN if v is None else v for k, v in given.items()}
    return Diagnosis(**numbers)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line for each row of plain data; mappings as JSON, None as nothing."""
    lines = list(rows)
    cells = ({key: _cell(value) for key, value in line.items()} for line in lines)
    tables.write_csv(path, list(lines[0]), cells)


def write_json(
    path: Path, rows: Iterable[Mapping[str, Any]], about: Mapping[str, Any]
) -> None:
    """Write ``{**about, "rows": […]}`` and, under ``"sha256"``, their checksum."""
    content = sealed_json({**about, "rows": list(rows)})
    with new_file(path) as out:
        json.dump(content, out, indent=2, allow_nan=False)
        out.write("\n")


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _number(value: float, digits: int = 3) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.0%}"


Cell = Callable[[Diagnosis], str]

COMMON: dict[str, Cell] = {
    "k of N": lambda row: f"{row.num_signal:.3g} of {row.num_tokens:.3g}",
    "loss": lambda row: _number(row.signal_loss),
    "excess": lambda row: _number(row.excess),
    "95 %": lambda row: _interval(row.excess_low, row.excess_high),
    "of mean": lambda row: _number(row.mean_excess),
    "w signal": lambda row: _number(row.signal_weight),
    "k/N": lambda row: _number(row.uniform_weight),
    "w self": lambda row: _number(row.self_weight),
}
SCORED: dict[str, Cell] = {
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


def print_table(rows: Sequence[tuple[str, Diagnosis]], title: str) -> None:
    """Show rows on screen, each below the name of what it is of."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column("", no_wrap=True)
    scored = any(row.checked for _, row in rows)
    columns = {**COMMON, **(SCORED if scored else {})}
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows:
        table.add_row(name, *_cells(row, columns))
    console = Console()
    # A pipe has no width of its own, and 80 columns would break the rows.
    console.width = console.width if console.is_terminal else 200
    console.print(table)
    for name, row in rows:
        if row.gap:
            console.print(f"not measured: {name}: {row.gap}", markup=False)


def _cells(row: Diagnosis, columns: Mapping[str, Cell]) -> list[str]:
    if row.gap:
        return ["not measured"]
    unscored = () if row.checked else SCORED
    return ["" if name in unscored else cell(row) for name, cell in columns.items()]
