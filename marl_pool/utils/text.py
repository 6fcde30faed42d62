"""Text from files and folders' names, made harmless where it is shown or written."""

import re
import shlex
import unicodedata
from typing import Any

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""How a cell begins that spreadsheets would compute, or one that was escaped."""
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of what moves the cursor, turns text around or ends a line."""


def printable(text: object) -> str:
    """Text on one line: control characters are shown as Python writes them.

    So a folder's name cannot clear a terminal, hide what follows or add a line.
    """
    return "".join(
        repr(each)[1:-1] if unicodedata.category(each) in HIDDEN else each
        for each in str(text)
    )


def quoted(path: object) -> str:
    """A path as a shell takes it, for commands that are shown to be copied.

    Dollar signs, backquotes, spaces and semicolons stand in single quotes, where a
    shell gives them no meaning; nothing that the package does runs a shell.
    """
    return shlex.quote(printable(path))


def literal(text: str) -> str:
    """Text for a picture, in which Matplotlib would take dollar signs for formulas."""
    return printable(text).replace("$", r"\$")


def cell(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet takes for a formula.

    Text that begins with one of ``= + - @``, a tab or a line's end gets a single quote
    before it, unless it is a number; `uncell` takes it off again. Other values stay.
    """
    if not isinstance(value, str) or not FORMULA.match(value) or _is_number(value):
        return value
    return f"'{value}"


def uncell(text: str) -> str:
    """What `cell` was given."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
