"""Short names in place of folders of the machine on which runs were made."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


def short_folders(configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A short name for each absolute folder in the configurations of all runs.

    A page that is sent to others does not show the folders of its author.

    Returns:
        By folder its last part, numbered where several folders end alike.
    """
    short: dict[str, str] = {}
    used: Counter[str] = Counter()
    for text in filter(_is_folder, dict.fromkeys(_texts(configs))):
        last = re.split(r"[\\/]", text.rstrip("\\/"))[-1] or "folder"
        used[last] += 1
        short[text] = last if used[last] == 1 else f"{last} ({used[last]})"
    return short


def with_short_folders(value: Any, short: Mapping[str, str]) -> Any:
    """Nested data with `short_folders` in place of folders."""
    if isinstance(value, str):
        return short.get(value, value)
    if isinstance(value, Mapping):
        return {key: with_short_folders(part, short) for key, part in value.items()}
    if isinstance(value, list):
        return [with_short_folders(part, short) for part in value]
    return value


def _is_folder(text: str) -> bool:
    paths = (PurePosixPath(text), PureWindowsPath(text))
    return text.startswith("~") or any(path.is_absolute() for path in paths)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
