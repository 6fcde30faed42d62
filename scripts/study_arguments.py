"""Command line of the scripts that tabulate and draw a study."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marl_pool.utils.errors import InputError


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


@contextmanager
def reported(parser: ArgumentParser) -> Iterator[None]:
    """End the program with one line and status 2 on an `InputError`."""
    try:
        yield
    except InputError as error:
        parser.error(str(error))
