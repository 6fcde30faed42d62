"""Progress, rate and remaining time of long work."""

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
    """A progress line: updated in place on a terminal, printed at intervals elsewhere.

    Use it as a context manager and call `update`.

    Args:
        total: units of work, including those of an earlier, resumed run.
        unit: name of the unit.
        done: units finished by the earlier run.
        time_limit: seconds after which the work ends in any case; None: no limit.
        interval: seconds between two lines without a terminal.
        stream: output stream; None: stderr.
        clock: returns seconds; for tests.
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
        """Show the progress and some numbers.

        Args:
            done: units finished in total, not since the last call.
            **numbers: numbers by name, such as ``return_mean=-1.4``; NaN is omitted.
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
        """Units a second since construction."""
        return (self.done - self._first) / max(self.clock() - self._began, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the total or the time limit is reached; None if unknown."""
        limits = []
        if self.rate > 0:
            limits.append((self.total - self.done) / self.rate)
        if self.time_limit is not None:
            limits.append(self.time_limit - (self.clock() - self._began))
        return max(min(limits), 0.0) if limits else None

    def line(self) -> str:
        """Format the progress as one line."""
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
    """Format seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
