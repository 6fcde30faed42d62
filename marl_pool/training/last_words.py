"""Report the sudden death of this process, which Ray can end without a word.

If a process of Ray dies, or its cluster is lost, Ray's C++ code ends the driver at
once: nothing in it can print a line. So a child of the driver does.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CLEAN = "."
"""Line that says that the parent ends on its own."""


@contextmanager
def last_words(message: str) -> Iterator[Callable[[int], None]]:
    """Print a message if this process dies in the block, however it dies.

    Yields:
        A function of the id of a process that shall not outlive this one.
    """
    # A script of its own, in isolation: it starts at once and imports nothing else. In
    # a session of its own, Ctrl-C does not reach it.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    pipe = child.stdin
    assert pipe is not None

    def tell(line: object) -> None:
        with suppress(BrokenPipeError):
            print(line, file=pipe, flush=True)

    tell(message)
    try:
        yield tell
    finally:
        tell(CLEAN)
        pipe.close()
        child.wait()


def _watch() -> None:
    message, *lines = (line.strip() for line in sys.stdin)
    if CLEAN in lines:
        return
    print(message, file=sys.stderr)
    for line in lines:
        with suppress(ProcessLookupError):
            os.kill(int(line), signal.SIGKILL)


if __name__ == "__main__":
    _watch()
