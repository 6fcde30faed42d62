"""CSV files: written whole or not at all, and without formulas."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_pool.utils.atomic import new_file
from marl_pool.utils.text import cell, uncell


def write_csv(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write a line of names and one for each row; what a row lacks stays empty.

    Text that a spreadsheet would compute is quoted; see `marl_pool.utils.text.cell`.

    Raises:
        ValueError: a row has a name that is no column.
    """
    with new_file(path) as out:
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writerow({name: cell(name) for name in columns})
        writer.writerows(
            {name: cell(value) for name, value in row.items()} for row in rows
        )


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows of what `write_csv` wrote, as text."""
    with path.open(newline="", encoding="utf-8") as lines:
        header, *rows = [list(map(uncell, line)) for line in csv.reader(lines)] or [[]]
    return [dict(zip(header, row, strict=False)) for row in rows]
