"""Signals that stop a run after its iteration, and a limit on blocking calls."""

import atexit
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Self

from typing_extensions import override

STDERR = 2
"""File descriptor of standard error, even if `sys.stderr` is replaced."""
STOPPING = {signal.SIGINT, signal.SIGTERM}
"""Signals that stop a run, with a checkpoint."""
if hasattr(signal, "SIGUSR1"):  # SLURM's warning before the end of a job
    STOPPING.add(signal.SIGUSR1)


class Terminated(KeyboardInterrupt):
    """Termination by a signal that schedulers and containers send before they kill.

    The argument is the signal number.
    """


_handled: list[int] = []
"""Numbers of the signals handled in the block of `terminable`, since a blocking call of
Ray raises a plain `KeyboardInterrupt` in place of `Terminated`."""


def exit_status(error: KeyboardInterrupt) -> int:
    """Return the exit status that shells use for a signal, such as 130 for Ctrl-C."""
    if isinstance(error, Terminated):
        return 128 + int(error.args[0])
    return 128 + int(_handled[0] if _handled else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM and SIGUSR1."""

    def stop(number: int, frame: FrameType | None) -> None:
        _handled.append(number)
        raise Terminated(number)

    _handled.clear()
    with ExitStack() as stack:
        with suppress(ValueError):  # only the main thread may handle signals
            for number in STOPPING - {signal.SIGINT}:
                stack.callback(signal.signal, number, signal.signal(number, stop))
        yield


def prepare_exit() -> None:
    """Prepare the end of this process, which has nothing left to save.

    While Python waits for threads, which may never end, a signal ends the process;
    after that wait signals are ignored. The garbage collector is kept from searching a
    million objects of torch and ray for cycles.
    """
    with suppress(ValueError):  # only the main thread may handle signals
        for number in STOPPING - {signal.SIGINT}:
            signal.signal(number, lambda number, frame: os._exit(128 + number))
        # Python does this after the threads have ended.
        for number in STOPPING:
            atexit.register(signal.signal, number, signal.SIG_IGN)
    gc.freeze()


class Interruptible(ExitStack):
    """Context that notes the first signal of a kind, and raises the second.

    After any other signal Ctrl-C is raised at once.

    Attributes:
        interrupt: the error to raise for the first signal; None before it.
    """

    interrupt: KeyboardInterrupt | None = None

    def __init__(self) -> None:
        super().__init__()
        self._noted = set[int]()

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
        _handled.append(number)
        is_repeated = number in self._noted
        self._noted.add(number)
        source = signal.Signals(number)
        error = KeyboardInterrupt() if source == signal.SIGINT else Terminated(number)
        if self.interrupt is None:
            self.interrupt = error
            # Do not print: the interrupted code may hold the lock of the stream.
            line = f"{source.name}: stopping after this iteration"
            if source == signal.SIGINT:
                line = (
                    "stopping after this iteration; press Ctrl-C again to stop at once"
                )
            _write(f"\nmarl-pool: {line}\n")
        # SLURM sends SIGTERM after SIGUSR1: let the checkpoint be saved.
        elif source == signal.SIGINT or is_repeated:
            raise error


@contextmanager
def patience(subject: str, limit: float, interval: float = 10.0) -> Iterator[None]:
    """Print a line at intervals, and end the block after the limit.

    Only the main thread can be interrupted; elsewhere the block has no limit.

    Args:
        subject: what the block waits for, for the line and the message.
        limit: seconds.
        interval: seconds between two lines.

    Raises:
        TimeoutError: the block took longer than the limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()

    def tick(number: int, frame: FrameType | None) -> None:
        # Ray's blocking calls end only for this exception.
        waited = time.monotonic() - began
        if waited >= limit:
            raise KeyboardInterrupt
        # Do not print: the interrupted code may hold the lock of the stream.
        _write(f"marl-pool: {subject}: {waited:.0f} s\n")

    previous = signal.signal(signal.SIGALRM, tick)
    interval = min(interval, limit)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    except KeyboardInterrupt as error:
        if time.monotonic() - began < limit:
            raise  # Ctrl-C
        raise TimeoutError(f"{subject}: not within {limit:.0f} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _write(text: str) -> None:
    """Write to standard error from a signal handler."""
    # Ctrl-C ends the reader of a pipe too, such as `tee`, but the run has to be saved.
    with suppress(OSError):
        os.write(STDERR, text.encode())
