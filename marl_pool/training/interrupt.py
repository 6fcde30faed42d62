"""Ctrl-C that lets work reach a point from which it can go on."""

import os
import signal
from types import FrameType, TracebackType

STDERR = 2
"""The process's own, whatever `sys.stderr` was replaced by."""
STOPPING = b"\nmarl-pool: stopping where it can go on; Ctrl-C again stops at once\n"


class Interruptible:
    """While it is entered, the first Ctrl-C only sets `asked`; a second one stops.

    Attributes:
        asked: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: signal._HANDLER = None
        self._ours = False

    def __enter__(self) -> "Interruptible":
        try:
            self._before = signal.signal(signal.SIGINT, self._stop)
        except ValueError:  # not the main thread: signals are someone else's
            return self
        self._ours = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # A handler may not wait for a lock that the code it interrupts has: no print.
        os.write(STDERR, STOPPING)
