"""A limit on calls that may block for ever, such as the start of remote processes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from marl_pool.training.signals import STDERR


@contextmanager
def patience(what: str, limit: float, interval: float = 10.0) -> Iterator[None]:
    """Print a line at intervals, and end the block after the limit.

    Only the main thread can be interrupted; elsewhere the block has no limit.

    Args:
        what: what the block waits for, for the line and the message.
        limit: seconds.
        interval: seconds between two lines.

    Raises:
        TimeoutError: the block took longer than the limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()

    def late() -> bool:
        return time.monotonic() - began >= limit

    def tick(number: int, frame: FrameType | None) -> None:
        # Ray's blocking calls end only for this exception.
        if late():
            raise KeyboardInterrupt
        # Do not print: the interrupted code may hold the lock of the stream.
        seconds = f"{time.monotonic() - began:.0f} s"
        os.write(STDERR, f"marl-pool: {what}: {seconds}\n".encode())

    previous = signal.signal(signal.SIGALRM, tick)
    interval = min(interval, limit)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    except KeyboardInterrupt as error:
        if not late():
            raise  # Ctrl-C
        raise TimeoutError(f"{what}: not within {limit:.0f} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
