"""The version, in one place: the build reads it here too."""

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def commit() -> str | None:
    """Return the commit of the git checkout, ``+`` if changed; None without one."""
    source = Path(__file__).parent
    if not (source.parent / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)

    try:
        head = git("rev-parse", "--short=12", "HEAD").strip()
        changes = git("status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changes else head
