"""The table kit: tables on screen and as CSV files."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from marl_pool.utils.atomic import new_file
from marl_pool.utils.text import cell, printable, uncell


def write_csv(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write a header line and a line for each row, whose keys are columns.

    Missing keys and None are empty cells, and mappings are JSON. Text that a
    spreadsheet would evaluate is quoted; see `marl_pool.utils.text.cell`.
    """
    with new_file(path) as out:
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writerow({name: cell(name) for name in columns})
        for row in rows:
            texts = {k: json.dumps(v) for k, v in row.items() if isinstance(v, dict)}
            writer.writerow({k: cell(v) for k, v in {**row, **texts}.items()})


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a file of `write_csv`; all values are text."""
    with path.open(newline="", encoding="utf-8") as lines:
        header, *rows = [list(map(uncell, line)) for line in csv.reader(lines)] or [[]]
    return [dict(zip(header, row, strict=False)) for row in rows]


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str,
    caption: str = "",
    width: int = 140,
    num_names: int = 1,
) -> None:
    """Print a table with numbers aligned to the right.

    Args:
        columns: headings.
        rows: cells; missing ones at the end of a row are empty.
        title: line above the table.
        caption: line below the table.
        width: characters a line where there is no terminal.
        num_names: leading columns of text, aligned to the left.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, rows, shown = Console(), list(rows), len(columns)
    if console.is_terminal:
        # Rows that break are hard to read: leave out the last columns instead.
        shown = max(_fitting(columns, rows, console.width), num_names + 1)
    else:
        # A pipe has no width of its own, and rich's default of 80 columns breaks rows.
        console.width = width
    if shown < len(columns):
        hint = f"a wider terminal shows {', '.join(columns[shown:])} too"
        caption = f"{caption}; {hint}" if caption else hint
    table = Table(
        title=Text(printable(title)),
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
    )
    # The first columns are names, the others numbers.
    for place, name in enumerate(columns[:shown]):
        table.add_column(name, justify="left" if place < num_names else "right")
    for row in rows:
        table.add_row(*(Text(printable(text)) for text in row[:shown]))
    console.print(table)


def _fitting(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> int:
    """Return how many of the columns a table of ``width`` characters has room for."""
    widest = [len(name) for name in columns]
    for row in rows:
        for place, text in enumerate(row):
            widest[place] = max(widest[place], len(printable(text)))
    ends = accumulate((each + 3 for each in widest), initial=1)
    return sum(end <= width for end in ends) - 1


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by None, for CSV and JSON files."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
