"""Tables on screen and as CSV files."""

import csv
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from marl_pool.files.atomic import new_file
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
    """Read a file from `write_csv`; all values are text."""
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
    drop_first: Collection[int] = (),
) -> None:
    """Print a table with numbers aligned to the right.

    Args:
        columns: headings.
        rows: cells; missing ones at the end of a row are empty.
        title: line above the table.
        caption: line below the table.
        width: characters per line if there is no terminal.
        num_names: number of leading columns of text, aligned to the left.
        drop_first: indices of the columns that a narrow terminal leaves out first, in
            this order, before it leaves out the last ones.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, rows, visible = Console(), list(rows), list(range(len(columns)))
    if console.is_terminal:
        # Rows that wrap are hard to read: leave out columns instead.
        visible = _fitting(columns, rows, console.width, num_names, drop_first)
    else:
        # A pipe has no width, and rich's default of 80 columns wraps rows.
        console.width = width
    if hidden := [name for k, name in enumerate(columns) if k not in visible]:
        hint = f"a wider terminal shows {', '.join(hidden)} too"
        caption = f"{caption}; {hint}" if caption else hint
    table = Table(
        title=Text(printable(title)),
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
    )
    for place in visible:
        justify: Literal["left", "right"] = "left" if place < num_names else "right"
        table.add_column(columns[place], justify=justify)
    for row in rows:
        cells = [row[place] for place in visible if place < len(row)]
        table.add_row(*(Text(printable(text)) for text in cells))
    console.print(table)


def _fitting(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int,
    num_names: int,
    drop_first: Collection[int],
) -> list[int]:
    """Return the columns that a table of ``width`` characters has room for."""
    widest = [len(name) for name in columns]
    for row in rows:
        for place, text in enumerate(row):
            widest[place] = max(widest[place], len(printable(text)))
    room = width - 1 - sum(size + 3 for size in widest)
    numbers = reversed(range(num_names + 1, len(columns)))
    last = [place for place in numbers if place not in drop_first]
    hidden: list[int] = []
    for place in [*drop_first, *last]:
        if room < 0:
            hidden.append(place)
            room += widest[place] + 3
    # A narrow column may fit again in place of a wide one.
    for place in hidden[-2::-1]:
        if room >= widest[place] + 3:
            hidden.remove(place)
            room -= widest[place] + 3
    return [place for place in range(len(columns)) if place not in hidden]


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by None, for CSV and JSON files."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
