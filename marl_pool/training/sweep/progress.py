"""Progress display of a sweep: states of the trials, steps done, time left."""

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

from marl_pool.utils.progress import Progress

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED, FAILED = "stopped", "failed"


@dataclass
class TrialProgress:
    """One row of a `TrialTable`.

    Attributes:
        total: steps of the finished trial.
        steps: steps done.
        state: one of the constants of this module.
        note: reason of a failure.
        started: clock and steps when this process started the trial.
    """

    total: int
    steps: int
    state: str
    note: str = ""
    started: tuple[float, int] = (0.0, 0)


class TrialTable:
    """Table of the running and failed trials, with a summary line of all trials.

    A terminal shows it live. Any other stream gets a line whenever the state of a
    trial changes, and the summary every ``interval`` seconds. Use it as a context
    manager.

    Args:
        totals: steps of each finished trial, by name.
        done: steps done, by name.
        unit: name of the steps.
        interval: seconds between two summaries where there is no terminal.
        stream: output; None: stderr.
        clock: returns seconds; tests replace it.
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
        self.rows = {
            name: TrialProgress(
                total, done[name], FINISHED if done[name] >= total else WAITING
            )
            for name, total in totals.items()
        }
        self.interval, self.clock = interval, clock
        self._stream = sys.stderr if stream is None else stream
        self._total = Progress(
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

    def __enter__(self) -> "TrialTable":
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
        """Set the state of a trial."""
        row = self.rows[name]
        row.state, row.note = state, note
        if state == RUNNING:
            row.started = (self.clock(), row.steps)
        if self._live is None:
            print(self._describe(name), file=self._stream, flush=True)
        self._refresh()

    def advance(self, steps: Mapping[str, int]) -> None:
        """Set the steps done, by trial name."""
        for name, count in steps.items():
            self.rows[name].steps = count
        self._refresh()

    def named(self, state: str) -> list[str]:
        """Names of the trials in a state."""
        return [name for name, row in self.rows.items() if row.state == state]

    def summary(self) -> str:
        """Count the trials in each state; add steps, rate and remaining time."""
        count = Counter(row.state for row in self.rows.values())
        states = (WAITING, RUNNING, FINISHED, STOPPED, FAILED)
        counts = ", ".join(
            f"{count[state]} {state}" for state in states if count[state]
        )
        # The remaining steps of failed trials take no time.
        self._total.total = sum(
            row.steps if row.state == FAILED else row.total
            for row in self.rows.values()
        )
        self._total.done = self._done()
        return f"{counts}; {self._total.line()}"

    def _done(self) -> int:
        # The last iteration may overshoot.
        return sum(min(row.steps, row.total) for row in self.rows.values())

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table())
        elif self.clock() - self._last >= self.interval:
            self._last = self.clock()
            print(self.summary(), file=self._stream, flush=True)

    def _table(self) -> Group:
        shown = Table.grid(padding=(0, 2))
        for name in (*self.named(FAILED), *self.named(RUNNING)):
            shown.add_row(Text(self._describe(name)))
        return Group(shown, Text(self.summary()))

    def _describe(self, name: str) -> str:
        row = self.rows[name]
        seconds = self.clock() - row.started[0]
        steps = row.steps - row.started[1]
        rate = ""
        if steps and seconds > 0:
            speed = steps / seconds
            rate = f"  {speed:,.0f}" if speed >= 1 else f"  {speed:.2g}"
            rate += f" {self.unit}/s"
        note = f": {row.note}" if row.note else ""
        return f"{row.state}  {name}  {row.steps:,} / {row.total:,}{rate}{note}"
