"""Progress, rate and remaining time of long work."""

import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(eq=False)
class Progress:
    """A progress line: updated in place on a terminal, printed at intervals elsewhere.

    Use it as a context manager and call `update`. Work that does not call it for a
    while is shown with the time that it has taken.

    Args:
        total: units of work, including a resumed run's; 0 if unknown.
        unit: name of the unit.
        done: units finished so far; initially, by the resumed run.
        time_limit: seconds after which the work ends in any case, or None for no limit.
        interval: seconds between two lines without a terminal.
        doing: the current part of the work, such as ``"the last frames"``.
        stream: output stream, or None for stderr.
        clock: returns seconds; for tests.
    """

    total: int
    _: KW_ONLY
    unit: str = "steps"
    done: int = 0
    time_limit: float | None = None
    interval: float = 10.0
    doing: str = ""
    stream: TextIO | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._first, self._began = self.done, self.clock()
        self._last_line, self._numbers = -math.inf, ""
        self._is_printed = False
        self.stream = self.stream or sys.stderr
        self._console = Console(file=self.stream)
        self._live: Live | None = None
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, transient=True, get_renderable=self.display
            )
            self._live.start()
        else:
            self._ticker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._ended.set()
            self._ticker.join()
        # Work of unknown size has no final number, and a refusal stays one line.
        if not self._is_printed and self.total:
            self._print()

    def _tick(self) -> None:
        """Print a line after each interval without one."""
        while not self._ended.wait(self.interval):
            if self.clock() - self._last_line >= self.interval:
                self._print()

    def update(self, done: int, **numbers: float) -> None:
        """Show the progress and some numbers.

        Args:
            done: units finished in total, not since the last call.
            **numbers: numbers by name, such as ``return_mean=-1.4``; NaN is omitted.
        """
        self.done, self.doing = done, ""
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
            self._live.refresh()
        elif self.clock() - self._last_line >= self.interval:
            self._print()

    @property
    def rate(self) -> float:
        """Units per second since construction."""
        return (self.done - self._first) / max(self.elapsed, 1e-9)

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return self.clock() - self._began

    @property
    def fraction(self) -> float:
        """Part of the work that is done, by what ends it first: total or time limit."""
        parts = [self.done / max(self.total, 1)]
        if self.time_limit is not None:
            parts.append(self.elapsed / max(self.time_limit, 1e-9))
        return min(max(parts), 1.0)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the total or the time limit is reached; None if unknown."""
        # The total or the time limit ends the work, whichever is reached first.
        limits = []
        if self.rate > 0:
            limits.append((self.total - self.done) / self.rate)
        if self.time_limit is not None:
            limits.append(self.time_limit - self.elapsed)
        return max(min(limits), 0.0) if limits else None

    def line(self) -> str:
        """Format the progress as one line."""
        ago = duration(self.elapsed)
        doing = f"  {self.doing} ({ago})" if self.doing else ""
        # Without a rate, only the elapsed time changes.
        if self.total and self.done == self._first:
            return f"{self.done:,} / {self.total:,} {self.unit}{doing or '  ' + ago}"
        if not self.total:
            return (doing or ago).strip()
        seconds = self.seconds_left
        rate = f"{self.rate:,.0f}" if self.rate >= 10 else f"{self.rate:.2g}"
        until = "" if seconds is None else f"  {duration(seconds)} left"
        return (
            f"{self.done:,} / {self.total:,} {self.unit}"
            f"  {rate} {self.unit}/s{until}{self._numbers}{doing}"
        )

    def display(self) -> RenderableType:
        """Lay out what a terminal shows."""
        line = Text(self.line())
        line.truncate(self._console.width - 1, overflow="ellipsis")
        width = min(24, self._console.width - line.cell_len - 2)
        if width < 4 or not (self.total or self.time_limit):
            return line
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(1.0, self.fraction, width=width), line)
        return row

    def print_line(self, line: str) -> None:
        """Print a line at once, if the stream still has a reader."""
        with suppress(OSError):
            print(line, file=self.stream, flush=True)

    def _print(self) -> None:
        self._last_line, self._is_printed = self.clock(), True
        self.print_line(self.line())


def duration(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
