"""Handling of Ctrl-C that lets an iteration finish before the run stops."""

import os
import signal
from types import FrameType, TracebackType

STDERR = 2
"""File descriptor of standard error, even if `sys.stderr` is replaced."""
STOPPING = (
    b"\nmarl-pool: stopping after this iteration; press Ctrl-C again to stop at once\n"
)


class Interruptible:
    """Context in which the first Ctrl-C only sets a flag; the second one interrupts.

    Attributes:
        requested: True after the first Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal._HANDLER = None
        self._ours = False

    def __enter__(self) -> "Interruptible":
        try:
            self._previous = signal.signal(signal.SIGINT, self._stop)
        except ValueError:  # only the main thread may handle signals
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
            signal.signal(signal.SIGINT, self._previous)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Do not print: the interrupted code may hold the lock of the stream.
        os.write(STDERR, STOPPING)
