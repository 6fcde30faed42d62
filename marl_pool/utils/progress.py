"""Progress, rate and remaining time of long work."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table


@dataclass(eq=False)
class Progress:
    """A progress line: updated in place on a terminal, printed at intervals elsewhere.

    Use it as a context manager and call `update`.

    Args:
        total: units of work, including those of an earlier, resumed run.
        unit: name of the unit.
        done: units finished so far; at first, by the earlier run.
        time_limit: seconds after which the work ends in any case; None: no limit.
        interval: seconds between two lines without a terminal.
        stream: output stream; None: stderr.
        clock: returns seconds; for tests.
    """

    total: int
    _: KW_ONLY
    unit: str = "steps"
    done: int = 0
    time_limit: float | None = None
    interval: float = 10.0
    stream: TextIO | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._first, self._began = self.done, self.clock()
        self._last_line, self._numbers = -math.inf, ""
        self._is_printed = False
        self.stream = self.stream or sys.stderr
        self._console = Console(file=self.stream)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self.display(), console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        if not self._is_printed:
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
        self.refresh()

    def refresh(self) -> None:
        """Show the current state: at once on a terminal, elsewhere if it is time."""
        self._is_printed = False
        if self._live is not None:
            self._live.update(self.display())
        elif self.clock() - self._last_line >= self.interval:
            self._print()

    @property
    def rate(self) -> float:
        """Units a second since construction."""
        return (self.done - self._first) / max(self.clock() - self._began, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the total or the time limit is reached; None if unknown."""
        # The total or the time limit ends the work, whichever is reached first.
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

    def display(self) -> RenderableType:
        """Lay out what a terminal shows."""
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(self.total, self.done, width=24), self.line())
        return row

    def print_line(self, line: str) -> None:
        """Print a line at once."""
        print(line, file=self.stream, flush=True)

    def _print(self) -> None:
        self._last_line, self._is_printed = self.clock(), True
        self.print_line(self.line())


def duration(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
