"""Progress display of a sweep: states of the trials, completed steps, time left."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from marl_pool.utils.progress import Progress


class TrialState(StrEnum):
    """State of a trial."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class TrialProgress:
    """One row of a `TrialTable`."""

    total: int
    """Steps of the trial once it is finished."""
    steps: int
    state: TrialState = TrialState.WAITING
    note: str = ""
    """Reason of a failure."""
    started: tuple[float, int] = (0.0, 0)
    """Clock and steps when this process started the trial."""


class TrialTable(Progress):
    """Table of the running and failed trials, with a summary line of all trials.

    A terminal shows it live. Any other stream gets a line whenever the state of a
    trial changes, and the summary at intervals. Use it as a context manager.

    Args:
        totals: steps of each trial once it is finished, by name.
        done: completed steps by name; 0 for trials without an entry.
        options: arguments of `Progress`.
    """

    def __init__(
        self, totals: Mapping[str, int], done: Mapping[str, int], **options: Any
    ) -> None:
        self.rows = {
            name: TrialProgress(total, done.get(name, 0))
            for name, total in totals.items()
        }
        for row in self.rows.values():
            if row.steps >= row.total:
                row.state = TrialState.FINISHED
        options = {"interval": 30.0, **options, "done": self._sum_done()}
        super().__init__(sum(totals.values()), **options)
        self._last_line = self.clock()

    def change(self, name: str, state: TrialState, note: str = "") -> None:
        """Set the state of a trial."""
        row = self.rows[name]
        row.state, row.note = state, note
        if state == TrialState.RUNNING:
            row.started = (self.clock(), row.steps)
        if self._live is None:
            self.print_line(self._describe(name))
        self.refresh()

    def advance(self, steps: Mapping[str, int]) -> None:
        """Set the completed steps, by trial name."""
        for name, count in steps.items():
            self.rows[name].steps = count
        self.refresh()

    def named(self, state: TrialState) -> list[str]:
        """Return the names of the trials in a state."""
        return [name for name, row in self.rows.items() if row.state == state]

    @property
    def states(self) -> dict[str, str]:
        """State of each trial, by name."""
        return {name: row.state for name, row in self.rows.items()}

    @override
    def line(self) -> str:
        rows = self.rows.values()
        count = Counter(row.state for row in rows)
        counts = ", ".join(
            f"{count[state]} {state}" for state in TrialState if count[state]
        )
        # The remaining steps of failed and stopped trials take no time.
        self.total = sum(
            r.steps if r.state in (TrialState.FAILED, TrialState.STOPPED) else r.total
            for r in rows
        )
        self.done = self._sum_done()
        return f"{counts}; {super().line()}"

    @override
    def display(self) -> Group:
        grid = Table.grid(padding=(0, 2))
        for name in (*self.named(TrialState.FAILED), *self.named(TrialState.RUNNING)):
            grid.add_row(Text(self._describe(name)))
        return Group(grid, Text(self.line()))

    def _sum_done(self) -> int:
        # The last iteration may overshoot.
        return sum(min(row.steps, row.total) for row in self.rows.values())

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
