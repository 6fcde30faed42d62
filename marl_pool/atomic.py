"""Writing so that a crash leaves the old content or the new, never a part; locks."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from marl_pool.errors import InputError


@contextmanager
def new_file(file: Path) -> Iterator[TextIO]:
    """Yield an open text file that takes the place of ``file`` when left."""
    with _beside(file) as beside, beside.open("w", newline="", encoding="utf-8") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def new_binary_file(file: Path) -> Iterator[BinaryIO]:
    """Yield an open binary file that takes the place of ``file`` when left."""
    with _beside(file) as beside, beside.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """Yield a path whose file takes the place of ``file`` if nothing went wrong."""
    beside = file.with_name(f".{file.name}.new")
    try:
        yield beside
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``folder`` when left.

    A crash between the two renames leaves the old content aside; see `recover`.
    """
    beside, old = folder.with_name(f".{folder.name}.new"), _aside(folder)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put a folder back that a crash in `new_folder` left aside."""
    if _aside(folder).is_dir() and not folder.exists():
        _aside(folder).rename(folder)


def standing(folder: Path) -> Path:
    """Where the content of ``folder`` is, also between the two renames."""
    aside = _aside(folder)
    return aside if aside.is_dir() and not folder.exists() else folder


@contextmanager
def locked(file: Path, refusal: str | None) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends.

    Args:
        file: made if there is none, and left there.
        refusal: what to say if another process holds it; None: wait for it.

    Raises:
        InputError: another process holds it; with the message ``refusal``.
    """
    import fcntl  # POSIX only; everything else here runs anywhere

    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError as error:
            raise InputError(str(refusal)) from error
        yield


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
