"""Durable writing: a crash or a power cut leaves the old content or the new.

A file or folder is written under a random name in the same folder, synced, and renamed,
and then its parent is synced. Temporary files are opened exclusively and without
following links, so that links in a folder from someone else cannot redirect a write.
"""

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from marl_pool.utils.errors import InputError

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.new")
"""Names of files and folders whose writing is unfinished."""


# Files


@contextmanager
def new_file(file: Path) -> Iterator[TextIO]:
    """Yield an open text file that replaces ``file`` on exit."""
    with beside_of(file) as beside:
        with beside.open("x", newline="", encoding="utf-8") as out:
            yield out
        _replace(beside, file)


def write_json(file: Path, content: Any, **options: Any) -> None:
    """Write plain data as a JSON file; ``options`` go to `json.dump`."""
    with new_file(file) as out:
        json.dump(content, out, **options)
        out.write("\n")


@contextmanager
def new_binary_file(file: Path) -> Iterator[BinaryIO]:
    """Yield an open binary file that replaces ``file`` on exit."""
    with beside_of(file) as beside:
        with beside.open("xb") as out:
            yield out
        _replace(beside, file)


@contextmanager
def new_path(file: Path) -> Iterator[Path]:
    """Yield a path whose file replaces ``file``, for libraries that open files by name.

    It is in a private folder, so that the file keeps its name and suffix.
    """
    with beside_of(file) as folder:
        folder.mkdir(0o700)
        yield folder / file.name
        if (folder / file.name).is_file():
            _replace(folder / file.name, file)


@contextmanager
def appended(file: Path) -> Iterator[TextIO]:
    """Yield a text file open for appending; raise OSError if it is a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW
    # Names that the system cannot decode contain surrogates.
    opened = os.open(file, flags, 0o666)
    errors = "backslashreplace"
    with os.fdopen(opened, "a", newline="", encoding="utf-8", errors=errors) as out:
        yield out


@contextmanager
def beside_of(path: Path) -> Iterator[Path]:
    """Yield an unpredictable path in the same folder; remove what is left there.

    An `OSError` from writing there names ``path``.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        yield beside
    except OSError as error:
        # A full disk's error names no file, and users do not know the temporary one.
        is_unnamed = error.filename is None and error.errno is not None
        if is_unnamed or str(error.filename).startswith(str(beside)):
            error.filename = str(path)
        raise
    finally:
        # An error here, as on a read-only file system, would hide the first one.
        with suppress(OSError):
            discard(beside)


def _replace(new: Path, file: Path) -> None:
    sync(new)
    new.replace(file)
    sync(file.parent)


# Folders


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync them."""
    missing = []
    while not folder.is_dir():
        # Check again: another process may have created it.
        if os.path.lexists(folder) and not folder.is_dir():
            reason = os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, reason, str(folder))
        missing.append(folder)
        folder = folder.parent
    for ancestor in reversed(missing):
        ancestor.mkdir(exist_ok=True)
        sync(ancestor.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` on exit.

    A crash between the two renames leaves the old content under another name; see
    `recover`.
    """
    # Complete what an interrupted replacement has left behind.
    make_folder(folder.parent)
    recover(folder)
    old = _aside(folder)
    # Fill a folder beside the old one.
    with beside_of(folder) as beside:
        beside.mkdir()
        yield beside
        # The new content has to be on the disk before the old one moves.
        for path, _, names in os.walk(beside, topdown=False):
            for name in names:
                sync(Path(path, name))
            sync(Path(path))
        # Move the old folder aside, and the new one into its place.
        if os.path.lexists(folder):
            discard(old)
            folder.rename(old)
        beside.rename(folder)
        sync(folder.parent)
        discard(old)


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a folder on exit if it is empty and did not exist before."""
    is_new = not folder.exists()
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # missing, or not empty
                folder.rmdir()


def recover(folder: Path) -> None:
    """Restore a folder after a crash between the renames of `new_folder`."""
    if readable_folder(folder) != folder:
        _aside(folder).rename(folder)
        sync(folder.parent)


def readable_folder(folder: Path) -> Path:
    """Return the folder with the content, also between the renames of `new_folder`."""
    aside = _aside(folder)
    is_aside = aside.is_dir() and not aside.is_symlink()
    return aside if is_aside and not os.path.lexists(folder) else folder


def discard(path: Path) -> None:
    """Remove a file, a folder or a link if it exists, without following links."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard_leftovers(folder: Path, of: str = "") -> None:
    """Remove what killed processes left unfinished, only ``of`` a name if it is given.

    No other process may be writing such files in the folder.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if LEFTOVER.fullmatch(name) and name.startswith(f".{of}." if of else "."):
                discard(folder / name)


def validate_inside(root: Path, *paths: Path) -> None:
    """Reject paths below ``root`` that a link leads out of it."""
    for path in paths:
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:  # a link to itself
            raise InputError(f"{path}: expected no circular link") from error
        if not real.is_relative_to(root.resolve()):
            raise InputError(
                f"{path}: expected a path inside {root}, got a link to {real}; nothing "
                "is written through it"
            )


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def sync(path: Path) -> None:
    """Sync a file's content or a folder's entries to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows cannot sync folders
    # A linked folder is the user's choice of a place; a linked file is not followed.
    kind = os.O_DIRECTORY if path.is_dir() else NO_FOLLOW
    opened = os.open(path, os.O_RDONLY | kind)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems cannot sync folders. Files must be synced.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(opened)


# Locks


@contextmanager
def locked(file: Path, refusal: str | None) -> Iterator[None]:
    """Hold a file lock, which the system releases however the process ends.

    Args:
        file: lock file; created if missing, never changed or removed.
        refusal: message if another process holds the lock, or None to wait for it.

    Raises:
        InputError: it is held, or the file is a link or cannot be opened.
    """
    import fcntl  # POSIX only; everything else here runs anywhere

    with ExitStack() as stack:
        try:
            opened = os.open(file, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
            stack.callback(os.close, opened)
            waits = refusal is None
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise InputError(str(refusal)) from error
        except OSError as error:
            reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise InputError(f"{file} cannot be locked: {reason}") from error
        yield
