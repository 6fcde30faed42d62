"""Durable writing: after a crash or a power cut the old content is there or the new.

Everything that the package writes goes through this module. A file or folder is
written under a random name beside its place, synced to the disk, renamed into place,
and then the folder that holds it is synced. Temporary files are opened exclusively and
no link is followed, so that a folder that somebody else has prepared cannot lead a
write elsewhere.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from marl_pool.utils.errors import InputError

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.new")
"""The name of what is being written, or was when its process was killed."""


# Files


@contextmanager
def new_file(file: Path) -> Iterator[TextIO]:
    """Yield an open text file that takes the place of ``file`` when left."""
    with (
        _beside(file) as beside,
        beside.open("x", newline="", encoding="utf-8") as out,
    ):
        yield out
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def new_binary_file(file: Path) -> Iterator[BinaryIO]:
    """Yield an open binary file that takes the place of ``file`` when left."""
    with _beside(file) as beside, beside.open("xb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def new_path(file: Path) -> Iterator[Path]:
    """Yield a path for a library that opens its files itself, as video encoders do.

    The path lies in a private folder of a random name, and what is written there takes
    the place of ``file`` when left; nothing happens if nothing was written.
    """
    folder = _temporary(file)
    folder.mkdir(0o700)
    try:
        yield folder / file.name
        if (folder / file.name).is_file():
            _sync(folder / file.name)
            (folder / file.name).replace(file)
            _sync(file.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def appended(file: Path) -> Iterator[TextIO]:
    """Yield an open text file to append to; made if there is none.

    Raises:
        OSError: it is a link, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW
    with os.fdopen(os.open(file, flags, 0o666), "a", newline="", encoding="utf-8") as o:
        yield o


def sync_file(file: Path) -> None:
    """Make what was appended to a file survive a power cut, if there is such a file."""
    with suppress(FileNotFoundError):
        _sync(file)


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """Yield a path whose file takes the place of ``file`` if nothing went wrong.

    It is to be opened exclusively (mode "x"), which follows no link either.
    """
    beside = _temporary(file)
    try:
        yield beside
        beside.replace(file)
        _sync(file.parent)
    finally:
        beside.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A path beside ``path`` that nobody can guess; see `LEFTOVER`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")


# Folders


def make_folder(folder: Path) -> None:
    """Make a folder and those above it so that they survive a power cut."""
    missing = []
    while not folder.is_dir():
        # Asked again, since another process may have made it meanwhile.
        if os.path.lexists(folder) and not folder.is_dir():
            reason = os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, reason, str(folder))
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync(each.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``folder`` when left.

    A crash between the two renames leaves the old content aside; see `recover`.
    """
    make_folder(folder.parent)
    recover(folder)
    beside, old = _temporary(folder), _aside(folder)
    beside.mkdir()
    try:
        yield beside
        _sync_tree(beside)
        if os.path.lexists(folder):
            discard(old)
            folder.rename(old)
        beside.rename(folder)
        _sync(folder.parent)
        discard(old)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put a folder back that a crash in `new_folder` left aside."""
    if standing(folder) != folder:
        _aside(folder).rename(folder)
        _sync(folder.parent)


def standing(folder: Path) -> Path:
    """Where the content of ``folder`` is, also between the two renames."""
    aside = _aside(folder)
    left = aside.is_dir() and not aside.is_symlink()
    return aside if left and not os.path.lexists(folder) else folder


def discard(path: Path) -> None:
    """Remove a file, a folder or a link, if it is there; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard_leftovers(folder: Path, of: str = "") -> None:
    """Remove what killed processes left unfinished; unknown names stay.

    Args:
        folder: in which nobody else writes what is removed.
        of: the file or folder whose leftovers are removed; by default of all.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if LEFTOVER.fullmatch(name) and name.startswith(f".{of}." if of else "."):
                discard(folder / name)


def refuse_link_out(path: Path, root: Path) -> None:
    """Refuse to write through a link that leads out of a folder.

    Args:
        path: below ``root``.
        root: the folder; it may itself be a link.

    Raises:
        InputError: such a link.
    """
    try:
        real, top = path.resolve(), root.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise InputError(f"{path}: expected no link in a circle") from error
    if not real.is_relative_to(top):
        raise InputError(
            f"{path}: expected a path inside {root}, got a link to {real}; nothing is "
            "written through it"
        )


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync_tree(folder: Path) -> None:
    """Sync every file below a folder, and every folder after what is in it."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(path, name))
        _sync(Path(path))


def _sync(path: Path) -> None:
    """Wait until the disk has a file's bytes or a folder's names."""
    if path.is_dir() and os.name != "posix":
        return  # Windows cannot, and needs not
    opened = os.open(path, os.O_RDONLY | NO_FOLLOW)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems cannot sync folders; for files it is a real fault.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(opened)


# Locks


@contextmanager
def locked(file: Path, refusal: str | None) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends.

    Args:
        file: made if there is none, and left there with what is in it.
        refusal: what to say if another process holds it; None: wait for it.

    Raises:
        InputError: another process holds it; with the message ``refusal``. Or the file
            is a link, or cannot be opened, as on a read-only disk.
    """
    import fcntl  # POSIX only; everything else here runs anywhere

    try:
        opened = os.open(file, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise InputError(f"{file} cannot be locked: {reason}") from error
    with os.fdopen(opened, "r+b") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError as error:
            raise InputError(str(refusal)) from error
        except OSError as error:
            reason = f"{file} cannot be locked: {error.strerror}"
            raise InputError(reason) from error
        yield
