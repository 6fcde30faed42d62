"""Escaping of text: on terminals, in shell commands, CSV files."""

import re
import shlex
import sys
import unicodedata
from contextlib import suppress
from typing import Any

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Start of a cell that spreadsheets evaluate as a formula, or of an escaped one."""
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that move the cursor, change the direction or end a line."""


def printable(text: object) -> str:
    """Escape control characters as in Python literals.

    The name of a folder then cannot clear a terminal, hide text or add lines.
    """
    return "".join(
        repr(character)[1:-1]
        if unicodedata.category(character) in HIDDEN
        else character
        for character in str(text)
    )


def single_line(value: object) -> str:
    """Return a value's text with each run of white space as one space."""
    return " ".join(str(value).split())


def kind_of(value: object) -> str:
    """Describe a value that has the wrong type, such as ``a list``."""
    return "None" if value is None else f"a {type(value).__name__}"


def print_line(line: object) -> None:
    """Print a line of the program itself, as opposed to its results, to stderr."""
    print_note(f"marl-pool: {printable(line)}")


def print_note(text: str) -> None:
    """Print text for a person to stderr.

    Without a reader, as when Ctrl-C has ended ``tee``, it is lost.
    """
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def quoted(path: object) -> str:
    """Quote a path for a shell command that users may copy.

    The package itself never runs a shell.
    """
    return shlex.quote(printable(path))


def is_url(text: str) -> bool:
    """Return True for a text such as ``s3://bucket/runs``."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


def cell(value: Any) -> Any:
    """Escape a CSV cell that a spreadsheet would evaluate as a formula.

    Text that starts with ``= + - @``, a tab or a line break is prefixed with a single
    quote unless it is a number. `uncell` is the inverse. Other values are unchanged.
    """
    if not isinstance(value, str) or not FORMULA.match(value):
        return value
    with suppress(ValueError):
        float(value)
        if value == value.strip():
            return value
    return f"'{value}"


def uncell(text: str) -> str:
    """Remove the escape of `cell`."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text
