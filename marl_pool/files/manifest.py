"""Checksums that detect truncated files and flipped bits, but not forgery.

A folder has a ``manifest.json`` with the size and SHA-256 of each of its files, and a
JSON file its checksum under ``"sha256"``. Files without a checksum, for example
handwritten ones and YAML files, are read unchecked.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from marl_pool.files.atomic import new_file, write_json
from marl_pool.files.reading import dump_yaml, read_json, read_yaml
from marl_pool.utils.errors import InputError, explain_os_errors

MANIFEST, FORMAT = "manifest.json", 1
KEY = "sha256"
CHANGED = "has changed since it was written: its checksum differs"


# Folders


def write_manifest(folder: Path, files: Iterable[str] = (), **entries: Any) -> None:
    """Write the manifest of a folder: ``files``, by default all, and ``entries``."""
    all_files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    paths = [folder / name for name in files] or all_files
    listed = {
        path.relative_to(folder).as_posix(): fingerprint(path)
        for path in paths
        if path != folder / MANIFEST
    }
    _write(folder, {"format": FORMAT, "files": listed, **entries})


def add_to_manifest(folder: Path, file: str) -> None:
    """Add or update one file in the manifest, which is created if it is missing."""
    try:
        content = read_manifest(folder)
    except FileNotFoundError:
        content = {"format": FORMAT, "files": {}}
    content["files"][file] = fingerprint(folder / file)
    _write(folder, content)


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    write_json(folder / MANIFEST, sealed_json(content), indent=1)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        FileNotFoundError: the folder has none.
        InputError: it is damaged, or lists files outside the folder.
    """
    try:
        content = read_json(folder / MANIFEST)
        sealed = isinstance(content, dict) and KEY in content
        if not (sealed and is_intact_json(content) and _lists_files(content)):
            raise ValueError("it has changed since it was written")
    except FileNotFoundError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{MANIFEST} cannot be read: {error}") from error
    return dict(content)


def _lists_files(content: Mapping[str, Any]) -> bool:
    """Return True if a manifest, perhaps a forged one, lists files in its folder."""
    files = content.get("files")
    return (
        isinstance(files, dict)
        and any(files)
        and all(
            isinstance(entry, dict)
            and entry.keys() == {"bytes", KEY}
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            for name, entry in files.items()
        )
    )


def problem_of(folder: Path, *, links: bool = True, only: str | None = None) -> str:
    """Return the first difference between a folder and its manifest, or ``""``.

    Args:
        folder: folder with a manifest.
        links: whether the folder and its files may be links.
        only: compare this file alone, if it is listed.

    Raises:
        FileNotFoundError: the folder has no manifest.
    """
    # A link could point to files outside the folder.
    if not links and folder.is_symlink():
        return "it is a link"
    try:
        files = read_manifest(folder)["files"]
    except InputError as error:
        return str(error)
    # Check the files one by one, and return the first problem.
    for name, expected in files.items():
        if only not in (None, name):
            continue
        path = folder / name
        # A folder above the file may be a link as well.
        way = (path, *path.parents)[: len(Path(name).parts)]
        if not links and any(part.is_symlink() for part in way):
            return f"{name} is a link"
        if not path.is_file():
            return f"{name} is missing"
        # Compare the sizes first: reading a large file takes time.
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, not {expected['bytes']}"
            actual = fingerprint(path)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if actual != expected:
            return f"{name} {CHANGED}"
    return ""


def validate_intact(folder: Path, only: str | None = None) -> None:
    """Reject a folder, or one file in it, that differs from its manifest, if any."""
    try:
        problem = problem_of(folder, only=only)
    except FileNotFoundError:
        return
    if problem:
        raise InputError(
            f"{folder} is damaged: {problem} (if you changed it on purpose, remove its "
            f"{MANIFEST})"
        )


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return {"bytes": content.tell(), KEY: digest.hexdigest()}


# Single files


def sealed_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum of the content to it."""
    entries = {name: value for name, value in content.items() if name != KEY}
    # Convert tuples to lists and keys to text, as they are in the file.
    parsed = json.loads(json.dumps(entries))
    plain = json.dumps(parsed, sort_keys=True, separators=(",", ":"))
    return {**entries, KEY: hashlib.sha256(plain.encode()).hexdigest()}


def is_intact_json(content: Mapping[str, Any]) -> bool:
    """Return True if JSON content matches its checksum, or has none."""
    return KEY not in content or content[KEY] == sealed_json(content)[KEY]


def write_yaml(file: Path, content: Mapping[str, Any]) -> None:
    """Write a YAML file that people may edit, or raise `InputError`."""
    text = dump_yaml(dict(content), allow_unicode=True)
    with explain_os_errors(f"{file} cannot be written"), new_file(file) as out:
        out.write(text)


def read_complete_yaml(file: Path, last: str) -> dict[str, Any]:
    """Read a file from `write_yaml` that must have the key ``last``, with a text.

    Raises:
        FileNotFoundError: it does not exist.
        InputError: it cannot be read, or is truncated.
    """
    content = read_yaml(file)
    if not isinstance(content, dict) or not isinstance(content.get(last), str):
        raise InputError(
            f"{file} cannot be read: it is truncated, or not written by marl_pool: no "
            f"{last}"
        )
    return content
