"""How far long work is, at what rate, and how long it will take."""

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table


class Progress:
    """A line that says how far work is: a moving one on a terminal, else now and then.

    Use it as a context manager and call `update`.

    Args:
        total: units of work, those done earlier included.
        unit: what is counted.
        done: units done earlier, by the run that is resumed.
        time_limit: seconds after which the work ends anyway; None: no limit.
        interval: seconds between two lines where there is no terminal.
        stream: written to; None: stderr.
        clock: tells the seconds; for tests.
    """

    def __init__(
        self,
        total: int,
        *,
        unit: str = "steps",
        done: int = 0,
        time_limit: float | None = None,
        interval: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.unit, self.done = total, unit, done
        self.time_limit, self.interval, self.clock = time_limit, interval, clock
        self._first, self._began = done, clock()
        self._last_line, self._numbers = -float("inf"), ""
        self._printed: int | None = None
        self._stream = sys.stderr if stream is None else stream
        self._console = Console(file=self._stream)
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live = Live(self._bar(), console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._printed != self.done:
            self._print()

    def update(self, done: int, **numbers: float) -> None:
        """Show that ``done`` units are done, and some numbers by name.

        Args:
            done: units in all, not since the last call.
            **numbers: shown beside it, such as ``return_mean=-1.4``; NaN: not yet.
        """
        self.done = done
        self._numbers = "".join(
            f"  {name.replace('_', ' ')} {value:.4g}"
            for name, value in numbers.items()
            if not math.isnan(value)
        )
        if self._live is not None:
            self._live.update(self._bar())
        elif self.clock() - self._last_line >= self.interval:
            self._print()

    @property
    def rate(self) -> float:
        """Units a second, since this object was made."""
        return (self.done - self._first) / max(self.clock() - self._began, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Until the total or the time limit is reached; None if nobody knows."""
        limits = []
        if self.rate > 0:
            limits.append((self.total - self.done) / self.rate)
        if self.time_limit is not None:
            limits.append(self.time_limit - (self.clock() - self._began))
        return max(min(limits), 0.0) if limits else None

    def line(self) -> str:
        """All of it as one line of text."""
        left = self.seconds_left
        rate = f"{self.rate:,.0f}" if self.rate >= 10 else f"{self.rate:.2g}"
        until = "" if left is None else f"  {duration(left)} left"
        return (
            f"{self.done:,} / {self.total:,} {self.unit}"
            f"  {rate} {self.unit}/s{until}{self._numbers}"
        )

    def _print(self) -> None:
        self._last_line, self._printed = self.clock(), self.done
        print(self.line(), file=self._stream, flush=True)

    def _bar(self) -> Table:
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(self.total, self.done, width=24), self.line())
        return row


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
