"""Command line of the scripts that tabulate and draw a study."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from marl_pool.utils.errors import InputError
from marl_pool.utils.text import printable


def study_parser(doc: str, *, needs_picture: bool = False) -> ArgumentParser:
    """Build a parser of the folder of a sweep and ``--out``, a picture to write."""
    parser = ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="folder of a sweep, or of runs")
    parser.add_argument(
        "--out", type=new_file, required=needs_picture, help="picture to write"
    )
    return parser


def new_file(text: str) -> Path:
    """Return the path of a file whose folder exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def absent_file(text: str) -> Path:
    """Return the path of a file that does not exist, in a folder that does."""
    path = new_file(text)
    if path.exists():
        raise ArgumentTypeError(f"{path} is there already: expected a new file")
    return path


def positive(text: str) -> int:
    """Return a number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def read_rows(
    file: Path, columns: Sequence[str], dtype: Mapping[str, type] | None = None
) -> pd.DataFrame:
    """Read a CSV file that has at least one row and these columns.

    Args:
        file: the file.
        columns: names, besides which there may be others.
        dtype: column → type, instead of the one that fits its values.

    Raises:
        InputError: no such file, no rows, or other columns.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        table = pd.read_csv(file, dtype=dtype)
    except ValueError as error:
        raise InputError(f"{file}: no table: {printable(error)}") from None
    if table.empty or {*columns} - {*table}:
        names = ", ".join(columns)
        raise InputError(f"{file}: expected rows with the columns {names}")
    return table


@contextmanager
def reported(parser: ArgumentParser) -> Iterator[None]:
    """End the program with one line and status 2 on an `InputError`."""
    try:
        yield
    except InputError as error:
        parser.error(str(error))
