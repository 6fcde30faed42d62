"""The version, in one place: the build reads it here too."""

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def commit() -> str | None:
    """The commit of the source that runs, ``+`` if it was changed; None if unknown.

    It is known where the package runs from a git checkout of its own.
    """
    source = Path(__file__).parent
    if not (source.parent / ".git").exists():
        return None
    git = ["git", "-C", str(source)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "."],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changes)
