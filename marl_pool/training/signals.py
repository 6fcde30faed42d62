"""Ctrl-C that lets an iteration end before the run stops."""

import os
import signal
from types import FrameType, TracebackType

STDERR = 2
"""File descriptor of the process, whatever `sys.stderr` was replaced by."""
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
        except ValueError:  # signals reach the main thread only
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
        # No print: the interrupted code may hold the lock of the stream.
        os.write(STDERR, STOPPING)
