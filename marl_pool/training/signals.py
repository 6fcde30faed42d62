"""Handling of Ctrl-C that lets an iteration finish before the run stops."""

import os
import signal
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Self

from typing_extensions import override

STDERR = 2
"""File descriptor of standard error, even if `sys.stderr` is replaced."""
STOPPING = (
    b"\nmarl-pool: stopping after this iteration; press Ctrl-C again to stop at once\n"
)


class Interruptible(ExitStack):
    """Context in which the first Ctrl-C only sets a flag; the second one interrupts.

    Attributes:
        requested: True after the first Ctrl-C.
    """

    requested = False

    @override
    def __enter__(self) -> Self:
        with suppress(ValueError):  # only the main thread may handle signals
            previous = signal.signal(signal.SIGINT, self._stop)
            self.callback(signal.signal, signal.SIGINT, previous)
        return super().__enter__()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Do not print: the interrupted code may hold the lock of the stream.
        os.write(STDERR, STOPPING)
