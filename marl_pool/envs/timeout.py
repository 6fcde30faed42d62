"""A time limit on each call of an environment, for simulators that hang."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from typing_extensions import override

from marl_pool.utils.errors import InputError, StoppedError, described
from marl_pool.utils.text import print_note

REMOTE_LIMIT = 600.0
"""Seconds that a call may take in remote processes, where nobody presses Ctrl-C."""
GRACE = 5.0
"""Seconds from the exception to the end of the process, if the call does not return."""
RAISED_BY = "raised by "
"""Start of the note that `env_call` adds to an exception."""
STATUS = 1
"""Exit status of a process that had to be ended."""


class EnvTimeoutError(RuntimeError):
    """A call of an environment that took longer than ``env_timeout``."""


# Not a RuntimeError: contextlib takes one whose cause is a StopIteration for Python's
# own (PEP 479), and lets the StopIteration pass.
class EnvExitError(Exception):
    """An exception of an environment that would end the process or a caller's loop.

    Examples are `SystemExit` and `StopIteration`.
    """


class Watchdog(threading.Thread):
    """A thread that interrupts calls that exceed a time limit.

    In the main thread, `EnvTimeoutError` is raised in the call. Where that is not
    possible, in another thread or in a library that never returns to Python, the
    process ends with the same line.

    Args:
        seconds: limit of one call.
        describe: returns the last line of a process that is ended, given the reason.
    """

    def __init__(self, seconds: float, describe: Callable[[str], str]) -> None:
        super().__init__(daemon=True, name="env_timeout")
        self.seconds, self.describe = seconds, describe
        self.call: tuple[str, float] | None = None
        self.main = threading.current_thread() is threading.main_thread()
        self.closed = threading.Event()

    @override
    def run(self) -> None:
        raised = None
        while not self.closed.wait(min(self.seconds / 4, 0.5)):
            call = self.call
            late = 0.0 if call is None else time.monotonic() - call[1] - self.seconds
            if call is None or late <= 0:
                continue
            # A signal interrupts system calls, but only in the main thread.
            if self.main and raised != call:
                raised = call
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            elif not self.main or late > GRACE:
                print_note(f"\nmarl-pool: {self.describe(self.reason)}")
                os._exit(STATUS)

    @property
    def reason(self) -> str:
        """The message: the call that hangs, and the limit."""
        name = self.call[0] if self.call else "an environment"
        return (
            f"{name} took longer than {self.seconds:g} seconds, the limit env_timeout"
        )

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception in the main thread, if the call has not returned."""
        if self.call is not None:
            raise EnvTimeoutError(self.reason)


_active: Watchdog | None = None


@contextmanager
def limit_calls(
    seconds: float | None, describe: Callable[[str], str] = str
) -> Iterator[None]:
    """Limit each `env_call` in the block; None leaves an outer limit as it is."""
    global _active
    if seconds is None:
        yield
        return
    outer, _active = _active, Watchdog(seconds, describe)
    previous = None
    if _active.main:
        previous = signal.signal(signal.SIGALRM, _active.interrupt)
    _active.start()
    try:
        yield
    finally:
        _active.closed.set()
        _active.join()
        if _active.main:
            signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)
        _active = outer


@contextmanager
def env_call(env: object, operation: str) -> Iterator[None]:
    """Apply the limit of `limit_calls` to a block, such as one step.

    Exceptions get a note that names the call; see `raised_by`.

    Raises:
        EnvExitError: in place of an exception that would silently end the process or a
            generator. A KeyboardInterrupt, which signals raise too, passes unchanged.
    """
    watchdog, call = _active, f"{operation} of {type(env).__name__}"
    if watchdog is not None:
        watchdog.call = call, time.monotonic()
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            error.add_note(RAISED_BY + call)
            raise
        fatal = EnvExitError(f"{type(error).__name__}: {error}".removesuffix(": "))
        fatal.add_note(RAISED_BY + call)
        raise fatal.with_traceback(error.__traceback__) from error
    finally:
        if watchdog is not None:
            watchdog.call = None


@contextmanager
def explain_call_errors() -> Iterator[None]:
    """Turn an exception of an `env_call` into one line; an `InputError` is one.

    Raises:
        StoppedError: in place of the exception.
    """
    try:
        yield
    except InputError:
        raise
    except EnvTimeoutError as error:
        raise StoppedError(str(error)) from error
    except Exception as error:
        # What is called is the user's code; any other failure is our own bug.
        if not (call := raised_by(error)):
            raise
        raise StoppedError(f"{described(error)}, raised by {call}") from error


def raised_by(error: Exception) -> str:
    """Return the `env_call` that raised an exception, or an empty string."""
    notes: list[str] = getattr(error, "__notes__", [])
    calls = [note for note in notes if note.startswith(RAISED_BY)]
    return calls[0].removeprefix(RAISED_BY) if calls else ""
