"""Escaping of text: on terminals, in shell commands, CSV files and overrides."""

import json
import numbers
import re
import shlex
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from marl_pool.utils.errors import InputError

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Start of a cell that spreadsheets evaluate as a formula, or of an escaped one."""
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that move the cursor, change the direction or end a line."""


def printable(text: object) -> str:
    """Escape control characters as in Python literals.

    The name of a folder then cannot clear a terminal, hide text or add lines.
    """
    return "".join(
        repr(each)[1:-1] if unicodedata.category(each) in HIDDEN else each
        for each in str(text)
    )


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


def literal(key: str, value: Any) -> str:
    """Write a plain value as Hydra reads it."""
    # JSON and Hydra write these values alike.
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str | Path):
        # Only the backslashes before a quote count as escapes.
        escaped = re.sub(
            r"(\\*)('|\Z)",
            lambda match: match[1] * 2 + (r"\'" if match[2] else ""),
            str(value),
        )
        return f"'{escaped}'"
    # numpy's numbers become plain ones.
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    # Lists and mappings are written recursively.
    if isinstance(value, list | tuple):
        return f"[{','.join(literal(key, item) for item in value)}]"
    if not isinstance(value, Mapping):
        got = type(value).__name__
        raise InputError(
            f"{key}: expected numbers, text, lists and mappings, got {got}"
        )
    for name in value:
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{key}: expected keys that are names, got {name!r:.80}")
    items = (f"{name}: {literal(key, item)}" for name, item in value.items())
    return f"{{{','.join(items)}}}"
