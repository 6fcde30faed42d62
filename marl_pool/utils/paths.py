"""Paths that a user types, and names of new folders."""

import os
from datetime import datetime
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ``~`` or ``~user`` at the start is the home folder.

    A path that begins with the name of no user is returned unchanged.
    """
    return Path(os.path.expanduser(path))


def dated(name: str) -> str:
    """Return the name of a new folder: date, time and ``name``."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
