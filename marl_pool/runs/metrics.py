"""The log ``metrics.csv`` of a run: appended, validated, truncated and repaired."""

import csv
import math
import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from io import StringIO
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from marl_pool.files.atomic import appended, new_binary_file, new_file, sync
from marl_pool.files.manifest import fingerprint
from marl_pool.files.reading import read_bytes
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import cell, uncell

ITERATION = "iteration"
LONGEST_HEADER = 1 << 20
MOST_BYTES = 1 << 28
"""Maximum size of a log in bytes: about 500,000 iterations."""
Row = dict[str, float]


class Metrics:
    """A CSV file of numbers with one row per iteration, created by the first one.

    The file survives crashes: an incomplete last line is ignored, checkpoints record a
    checksum of the rows so far, and unreadable rows are moved to a separate file.

    Attributes:
        last: the last row that this process logged; empty before the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: Row = {}

    # Writing

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row, which may omit columns. New ones are empty in earlier rows."""
        header = self._header() or []
        new_columns = [name for name in row if name not in header]
        if header and new_columns:
            self._append_columns(new_columns)
        header += new_columns
        with appended(self.path) as out:
            writer = csv.DictWriter(out, header, lineterminator="\n")
            if not out.tell():
                _write_header(out, header)
            writer.writerow(row)
        self.last = dict(row)

    def _append_columns(self, names: list[str]) -> None:
        header, lines = self._parsed()
        with new_file(self.path) as out:
            _write_header(out, [*header, *names])
            writer = csv.writer(out, lineterminator="\n")
            writer.writerows([*line, *("" for _ in names)] for line, _ in lines)

    def fix(self, iteration: int) -> dict[str, Any]:
        """Sync the file to disk and return its fingerprint for `problem`.

        Returns:
            ``metrics``: size, checksum and columns; ``row``: the last row. Empty if
            nothing was logged, or an iteration after ``iteration``.
        """
        if not self.path.is_file():
            return {}
        # A checkpoint may refer only to rows that survive a power cut.
        sync(self.path)
        columns = self._header() or []
        row = self.last or next(reversed(self.rows()), {})
        if row.get(ITERATION, 0) > iteration:
            return {}
        return {
            "metrics": {**fingerprint(self.path), "columns": columns},
            "row": {name: _number(str(value)) for name, value in row.items()},
        }

    def cut(self, logged: Mapping[str, Any]) -> None:
        """Truncate the file to the ``metrics`` of `fix`, without later columns."""
        part = self._logged_part(logged)
        if len(part) != self.path.stat().st_size:
            with new_binary_file(self.path) as out:
                out.write(part)

    def keep(self, iteration: int, columns: list[str] | None) -> str:
        """Keep only the readable rows up to an iteration.

        Returns:
            A message about unreadable lines, of which a copy is kept, or ``""``.
        """
        # Separate the readable rows.
        header, lines = self._parsed(columns, errors="replace")
        kept = [line for line, row in lines if row and row[ITERATION] <= iteration]
        bad = sum(row is None for _, row in lines)
        # Without a column of iterations, no row can be kept.
        if header and ITERATION not in header:
            bad, kept, header = len(lines) + 1, [], []
        # Copy a damaged file before it is replaced.
        message = ""
        if bad:
            copied = free(self.path.with_suffix(".damaged.csv"))
            message = f"{bad} lines that cannot be read are kept in {copied.name} only"
            with new_binary_file(copied) as copy:
                copy.write(self.path.read_bytes())
        # Write the remaining rows. Without any, let the next row set the columns.
        if not header or (columns is None and not kept):
            self.path.unlink(missing_ok=True)
            return message
        with new_file(self.path) as out:
            _write_header(out, header)
            csv.writer(out, lineterminator="\n").writerows(kept)
        return message

    # Reading

    def rows(self) -> list[Row]:
        """Read all rows; omitted values are NaN.

        Raises:
            InputError: the file is larger than `MOST_BYTES`, is not text, or has cells
                that are not numbers.
        """
        try:
            header, lines = self._parsed()
        except (UnicodeDecodeError, OSError) as error:
            raise InputError(f"{self.path} cannot be read: {error}") from error
        for number, (line, row) in enumerate(lines, 2):
            if row is None:
                raise InputError(
                    f"{self.path} is damaged: line {number}: expected {len(header)} "
                    f"numbers, got {','.join(line)[:80]!r}"
                )
        return [row for _, row in lines if row is not None]

    def readable_rows(self) -> list[Row]:
        """Read the intact rows of a file that may be damaged."""
        _, lines = self._parsed(errors="replace")
        return [row for _, row in lines if row is not None]

    def problem(self, logged: Mapping[str, Any], until: int) -> str:
        """Describe the difference to the ``metrics`` of `fix` at an iteration."""
        name = self.path.name
        if not self.path.is_file():
            return f"{name} is missing: its rows up to iteration {until} are lost"
        part = self._logged_part(logged)
        if len(part) < logged["bytes"]:
            return f"{name} was cut: rows up to iteration {until} are missing"
        if sha256(part).hexdigest() != logged["sha256"]:
            return (
                f"{name} has changed since iteration {until} was logged: its checksum "
                "differs"
            )
        return ""

    def _logged_part(self, logged: Mapping[str, Any]) -> bytes:
        """Return the bytes that `fix` described, or fewer if the file is shorter."""
        columns, header = logged["columns"], self._header() or []
        if header[: len(columns)] == columns != header:
            # `log` rewrote the file when a row added columns.
            _, lines = self._parsed(errors="replace")
            out = StringIO()
            _write_header(out, columns)
            csv.writer(out, lineterminator="\n").writerows(
                line[: len(columns)] for line, _ in lines
            )
            return out.getvalue().encode()[: logged["bytes"]]
        with self.path.open("rb") as content:
            return content.read(logged["bytes"])

    def _header(self) -> list[str] | None:
        if not self.path.is_file():
            return None
        with self.path.open("rb") as lines:
            first = lines.readline(LONGEST_HEADER).decode(errors="replace")
        if not first.endswith("\n"):
            return None
        return list(map(uncell, next(csv.reader([first]))))

    def _parsed(
        self, columns: list[str] | None = None, errors: str = "strict"
    ) -> tuple[list[str], list[tuple[list[str], Row | None]]]:
        """Parse the header, and each complete line: its cells and its row.

        A header that does not begin with ``columns`` is damaged: they replace it.
        """
        if not self.path.is_file():
            return columns or [], []
        try:
            content = read_bytes(self.path, MOST_BYTES)
        except InputError as error:
            raise InputError(f"{self.path} cannot be read: {error}") from error
        # A crash may have cut off the last line.
        text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors)
        lines = text.split("\n")[:-1]
        # Split damaged lines by commas, so that rows before them stay readable.
        try:
            rows = list(csv.reader(lines))
        except csv.Error:  # a NUL or an unclosed quote
            rows = [line.split(",") for line in lines]
        header, *body = rows or [[]]
        header = list(map(uncell, header))
        if columns is not None and header[: len(columns)] != columns:
            header = columns
        return header, [(line, _row(header, line)) for line in body]


def free(path: Path) -> Path:
    """Return the path itself, or ``STEM-2``, ``STEM-3``, … if it exists."""
    numbered = (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in count(2))
    return next(
        candidate
        for candidate in chain([path], numbered)
        if not os.path.lexists(candidate)
    )


def _write_header(out: TextIO, header: Iterable[str]) -> None:
    csv.writer(out, lineterminator="\n").writerow(map(cell, header))


def _row(header: list[str], line: list[str]) -> Row | None:
    """Parse a line; None if it is not a row of the log."""
    if len(line) != len(header):
        return None
    try:
        row = {name: _number(text) for name, text in zip(header, line, strict=True)}
    except ValueError:
        return None
    return row if isinstance(row.get(ITERATION), int) else None


def _number(text: str) -> float:
    if not text:
        return math.nan
    return int(text) if text.lstrip("-").isdigit() else float(text)
