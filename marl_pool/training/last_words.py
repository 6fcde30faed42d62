"""Print a message if this process is killed.

If a process of Ray dies, or its cluster is lost, Ray's C++ code ends the driver at
once: nothing in it can print a line. So a child of the driver does.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CLEAN = "."
"""What the child reads from its parent if that ends on its own."""


@contextmanager
def last_words(message: str, orphans: Collection[int] = ()) -> Iterator[None]:
    """Print a message if this process dies in the block, however it dies.

    Args:
        message: a line.
        orphans: ids of processes to kill if this one dies.
    """
    # A separate, isolated script starts at once and imports nothing else. In a new
    # session, Ctrl-C does not reach it.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, message, *map(str, orphans)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        yield
    finally:
        child.communicate(CLEAN)


def descendants(number: int) -> set[int]:
    """Return the ids of a process's children, and of theirs; none without ``/proc``."""
    children: set[int] = set()
    with suppress(OSError):  # it may end meanwhile
        for file in Path(f"/proc/{number}/task").glob("*/children"):
            children.update(map(int, file.read_text().split()))
    return children.union(*map(descendants, children))


def _watch(message: str, *orphans: str) -> None:
    # The pipe ends with the parent.
    if sys.stdin.read() == CLEAN:
        return
    print(message, file=sys.stderr)
    for number in orphans:
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


if __name__ == "__main__":
    _watch(*sys.argv[1:])
