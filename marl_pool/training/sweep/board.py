"""Which trials run, how far they are, and how long the rest will take."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marl_pool.progress import Progress

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED, FAILED = "stopped", "failed"


@dataclass
class Line:
    """What is shown of one trial.

    Attributes:
        total: steps after which it ends.
        steps: that are done.
        state: one of the constants of this module.
        note: why it failed.
        began: clock and steps at which this process saw it begin.
    """

    total: int
    steps: int
    state: str
    note: str = ""
    began: tuple[float, int] = (0.0, 0)


class Board:
    """A line for each trial that runs or failed, and one for all of them.

    On a terminal they move. Elsewhere a line is printed when a trial changes its
    state, and the last one now and then. Use it as a context manager.

    Args:
        totals: steps of each trial, by name.
        done: steps that are done, by name.
        unit: what a step is called.
        interval: seconds between two lines of the whole, where there is no terminal.
        stream: written to; None: stderr.
        clock: tells the seconds; for tests.
    """

    def __init__(
        self,
        totals: Mapping[str, int],
        done: Mapping[str, int],
        *,
        unit: str = "steps",
        interval: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lines = {
            name: Line(total, done[name], FINISHED if done[name] >= total else WAITING)
            for name, total in totals.items()
        }
        self.interval, self.clock = interval, clock
        self._stream = sys.stderr if stream is None else stream
        self._whole = Progress(
            sum(totals.values()),
            unit=unit,
            done=self._done(),
            stream=self._stream,
            clock=clock,
        )
        self.unit = unit
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self._last = clock()

    def __enter__(self) -> "Board":
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, transient=True)
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
        print(self.summary(), file=self._stream, flush=True)

    def change(self, name: str, state: str, note: str = "") -> None:
        """Give a trial another state."""
        line = self.lines[name]
        line.state, line.note = state, note
        if state == RUNNING:
            line.began = (self.clock(), line.steps)
        if self._live is None:
            print(self._describe(name), file=self._stream, flush=True)
        self._refresh()

    def advance(self, steps: Mapping[str, int]) -> None:
        """Say how many steps some trials have done in all."""
        for name, count in steps.items():
            self.lines[name].steps = count
        self._refresh()

    def named(self, state: str) -> list[str]:
        """The trials in that state."""
        return [name for name, line in self.lines.items() if line.state == state]

    def summary(self) -> str:
        """How many trials are in each state, and the steps and the time of all."""
        count = Counter(line.state for line in self.lines.values())
        states = (WAITING, RUNNING, FINISHED, STOPPED, FAILED)
        told = ", ".join(f"{count[state]} {state}" for state in states if count[state])
        # What failed is not waited for.
        self._whole.total = sum(
            line.steps if line.state == FAILED else line.total
            for line in self.lines.values()
        )
        self._whole.done = self._done()
        return f"{told}; {self._whole.line()}"

    def _done(self) -> int:
        # The last iteration may overshoot.
        return sum(min(line.steps, line.total) for line in self.lines.values())

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table())
        elif self.clock() - self._last >= self.interval:
            self._last = self.clock()
            print(self.summary(), file=self._stream, flush=True)

    def _table(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        for name in (*self.named(FAILED), *self.named(RUNNING)):
            rows.add_row(Text(self._describe(name)))
        return Group(rows, Text(self.summary()))

    def _describe(self, name: str) -> str:
        line = self.lines[name]
        seconds = self.clock() - line.began[0]
        taken = line.steps - line.began[1]
        rate = ""
        if taken and seconds > 0:
            pace = taken / seconds
            rate = f"  {pace:,.0f}" if pace >= 1 else f"  {pace:.2g}"
            rate += f" {self.unit}/s"
        note = f": {line.note}" if line.note else ""
        return f"{line.state}  {name}  {line.steps:,} / {line.total:,}{rate}{note}"
