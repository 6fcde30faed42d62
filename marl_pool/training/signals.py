"""Handling of Ctrl-C and SIGTERM that lets an iteration finish before the run stops."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Self

from typing_extensions import override

STDERR = 2
"""File descriptor of standard error, even if `sys.stderr` is replaced."""
STOPPING = {
    signal.SIGINT: b"\nmarl-pool: stopping after this iteration; press Ctrl-C again to "
    b"stop at once\n",
    signal.SIGTERM: b"\nmarl-pool: SIGTERM: stopping after this iteration\n",
}


class Terminated(KeyboardInterrupt):
    """End by SIGTERM, which schedulers and containers send before they kill."""


def exit_status(error: KeyboardInterrupt) -> int:
    """Return the status of a shell's process that a signal ended: 130 or 143."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, as Ctrl-C raises `KeyboardInterrupt`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with ExitStack() as stack:
        with suppress(ValueError):  # only the main thread may handle signals
            previous = signal.signal(signal.SIGTERM, stop)
            stack.callback(signal.signal, signal.SIGTERM, previous)
        yield


@contextmanager
def keep_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM after the block, which may replace it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


class Interruptible(ExitStack):
    """Context in which the first Ctrl-C or SIGTERM is only noted; the second is raised.

    Attributes:
        interrupt: the error that stands for the first signal; None before it.
    """

    interrupt: KeyboardInterrupt | None = None

    @override
    def __enter__(self) -> Self:
        with suppress(ValueError):  # only the main thread may handle signals
            for number in STOPPING:
                previous = signal.signal(number, self._stop)
                self.callback(signal.signal, number, previous)
        return super().__enter__()

    @property
    def requested(self) -> bool:
        """True after the first signal."""
        return self.interrupt is not None

    def raise_if_requested(self) -> None:
        """Raise `KeyboardInterrupt`, or `Terminated`, after the first signal."""
        if self.interrupt is not None:
            raise self.interrupt

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.raise_if_requested()
        by = signal.Signals(number)
        self.interrupt = Terminated() if by == signal.SIGTERM else KeyboardInterrupt()
        # Do not print: the interrupted code may hold the lock of the stream.
        os.write(STDERR, STOPPING[by])
