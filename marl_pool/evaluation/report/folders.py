"""What a page shows in place of folders on the machine where runs were made."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


def short_folders(configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a page shows in place of the absolute folders in configurations.

    Who reads a page need not learn where the runs were made.

    Args:
        configs: of all runs of the page.

    Returns:
        By folder its last part, numbered where several folders end alike.
    """
    short: dict[str, str] = {}
    for text in _texts(configs):
        if text not in short and _is_folder(text):
            last = re.split(r"[\\/]", text.rstrip("\\/"))[-1] or "folder"
            number = sum(_unnumbered(known) == last for known in short.values()) + 1
            short[text] = last if number == 1 else f"{last} ({number})"
    return short


def _unnumbered(shown: str) -> str:
    return re.sub(r" \(\d+\)$", "", shown)


def _is_folder(text: str) -> bool:
    return (
        text.startswith("~")
        or PurePosixPath(text).is_absolute()
        or PureWindowsPath(text).is_absolute()
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested data, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def shown(value: Any, short: Mapping[str, str]) -> Any:
    """Nested data with `short_folders` in place of folders."""
    if isinstance(value, str):
        return short.get(value, value)
    if isinstance(value, Mapping):
        return {key: shown(part, short) for key, part in value.items()}
    if isinstance(value, list):
        return [shown(part, short) for part in value]
    return value
