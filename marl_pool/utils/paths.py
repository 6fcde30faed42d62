"""Paths that a user types."""

import os
from pathlib import Path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ``~`` or ``~user`` at the start is the home folder.

    A path that begins with the name of no user is returned unchanged.
    """
    return Path(os.path.expanduser(path))
