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
    """Escape text for Matplotlib, which reads dollar signs as formulas."""
    return printable(text).replace("$", r"\$")


def cell(value: Any) -> Any:
    """Quote a CSV cell that a spreadsheet would read as a formula.

    Text that begins with one of ``= + - @``, a tab or a newline gets a leading single
    quote unless it is a number; `uncell` removes it. Other values are unchanged.
    """
    if not isinstance(value, str) or not FORMULA.match(value) or _is_number(value):
        return value
    return f"'{value}"


def uncell(text: str) -> str:
    """Undo `cell`."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
