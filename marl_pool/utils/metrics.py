"""``metrics.csv`` of a run: appended to, checked, cut back, and mended."""

import csv
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from marl_pool.utils.atomic import appended, new_binary_file, new_file, sync_file
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import fingerprint
from marl_pool.utils.text import cell, uncell

ITERATION = "iteration"
Row = dict[str, float]


class Metrics:
    """A CSV file of numbers, a row an iteration.

    Args:
        path: of the file; it exists once a row was logged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: Row = {}

    # Writing

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row; the first fixes the names, a later one may leave some out.

        Raises:
            ValueError: it has a name that the first had not.
        """
        header = self._header() or list(row)
        with appended(self.path) as out:
            writer = csv.DictWriter(out, header, lineterminator="\n")
            if not out.tell():
                _write_header(out, header)
            writer.writerow(row)
        self._last = dict(row)

    def fix(self, iteration: int) -> dict[str, Any]:
        """Make what is logged survive a power cut; say what it is, for `problem`.

        Args:
            iteration: that was logged last.

        Returns:
            Size, checksum and names of columns as ``metrics``, the last row as ``row``;
            nothing where nothing was logged, or more than this.
        """
        if not self.path.is_file():
            return {}
        sync_file(self.path)
        columns = self._header() or []
        row = self._last or next(reversed(self.rows()), {})
        if row.get(ITERATION, 0) > iteration:
            return {}
        return {
            "metrics": {**fingerprint(self.path), "columns": columns},
            "row": {name: _number(str(value)) for name, value in row.items()},
        }

    def cut(self, size: int) -> None:
        """Drop all but the first ``size`` bytes."""
        content = self.path.read_bytes()
        if len(content) > size:
            with new_binary_file(self.path) as out:
                out.write(content[:size])

    def keep(self, iteration: int, columns: list[str] | None) -> str:
        """Keep the readable rows up to an iteration.

        Args:
            iteration: the last to be kept.
            columns: the names, where they are known; None: as the file says.

        Returns:
            What could not be read, in words, and where it is now; empty if all could.
        """
        content = self.path.read_bytes() if self.path.is_file() else b""
        header, *lines = _parsed(content) or [[]]
        header = list(map(uncell, header)) if columns is None else columns
        read = [(line, _row(header, line)) for line in lines]
        kept = [line for line, row in read if row and row[ITERATION] <= iteration]
        bad = sum(row is None for _, row in read)
        if header and ITERATION not in header:
            bad, kept, header = len(lines) + 1, [], []
        told = ""
        if bad:
            aside = free(self.path.with_suffix(".damaged.csv"))
            told = f"{bad} lines that cannot be read are kept in {aside.name} only"
            with new_binary_file(aside) as copy:
                copy.write(content)
        if not header:
            self.path.unlink(missing_ok=True)
            return told
        with new_file(self.path) as out:
            _write_header(out, header)
            csv.writer(out, lineterminator="\n").writerows(kept)
        return told

    # Reading

    def rows(self) -> list[Row]:
        """All rows; NaN where a row left a name out.

        Raises:
            InputError: the file is damaged: not text, or a cell holds no number.
        """
        header, *lines = self._lines() or [[]]
        found = []
        for number, line in enumerate(lines, 2):
            row = _row(header, line)
            if row is None:
                raise InputError(
                    f"{self.path} is damaged: line {number}: expected {len(header)} "
                    f"numbers, got {','.join(line)[:80]!r}"
                )
            found.append(row)
        return found

    def readable_rows(self) -> list[Row]:
        """The rows that can be read, of a file that may be damaged."""
        if not self.path.is_file():
            return []
        header, *lines = _parsed(self.path.read_bytes()) or [[]]
        rows = (_row(list(map(uncell, header)), line) for line in lines)
        return [row for row in rows if row is not None]

    def problem(self, logged: Mapping[str, Any], until: int) -> str:
        """Describe how the file differs from the logged rows; empty if it does not.

        Args:
            logged: what `fix` returned as ``metrics``.
            until: the iteration at which it did.
        """
        name = self.path.name
        if not self.path.is_file():
            return f"{name} is missing: its rows up to iteration {until} are lost"
        found = fingerprint(self.path, logged["bytes"])
        if found["bytes"] < logged["bytes"]:
            return f"{name} was cut: rows up to iteration {until} are missing"
        if found["sha256"] != logged["sha256"]:
            return (
                f"{name} is not as it was logged up to iteration {until}: its checksum "
                "differs"
            )
        return ""

    def _header(self) -> list[str] | None:
        """The names of the columns; None if there are none yet."""
        if not self.path.is_file():
            return None
        with self.path.open(newline="", encoding="utf-8") as lines:
            first = lines.readline()
        whole = first.endswith("\n")
        return list(map(uncell, next(csv.reader([first])))) if whole else None

    def _lines(self) -> list[list[str]]:
        if not self.path.is_file():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as lines:
                # A line without its end was cut off by a crash.
                whole = [line for line in lines if line.endswith("\n")]
            header, *others = list(csv.reader(whole)) or [[]]
        except (UnicodeDecodeError, OSError, csv.Error) as error:
            raise InputError(f"{self.path} cannot be read: {error}") from error
        return [list(map(uncell, header)), *others]


def free(path: Path) -> Path:
    """The path, or ``STEM-2`` and so on if something is there."""
    found, number = path, 1
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _write_header(out: TextIO, header: Iterable[str]) -> None:
    csv.writer(out, lineterminator="\n").writerow(map(cell, header))


def _row(header: list[str], line: list[str]) -> Row | None:
    """A line as numbers; None if it is none."""
    if len(line) != len(header):
        return None
    try:
        row = {name: _number(text) for name, text in zip(header, line, strict=True)}
    except ValueError:
        return None
    return row if isinstance(row.get(ITERATION), int) else None


def _parsed(content: bytes) -> list[list[str]]:
    """The lines of a CSV file that may be damaged, but for one without its end."""
    text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    lines = text.split("\n")[:-1]
    try:
        return list(csv.reader(lines))
    except csv.Error:  # a NUL, or a quote that does not end
        return [line.split(",") for line in lines]


def _number(text: str) -> float:
    if not text:
        return math.nan
    return int(text) if text.lstrip("-").isdigit() else float(text)
