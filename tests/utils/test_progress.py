"""Progress: shown without updates, by the first limit, and fitted to the terminal."""

import io
import sys
import time

import pytest
from rich.console import Console

from marl_pool.files.tables import print_table
from marl_pool.utils.progress import Progress
from marl_pool.utils.text import print_line


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_without_updates_is_shown_with_its_time():
    stream = io.StringIO()
    with Progress(0, stream=stream, interval=0.01) as progress:
        progress.doing = "the last frames"
        end = time.monotonic() + 300
        while stream.getvalue().count("the last frames (0:") < 2:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_short_work_of_unknown_size_prints_nothing():
    stream = io.StringIO()
    with Progress(0, stream=stream) as progress:
        progress.doing = "a check"
    assert stream.getvalue() == ""


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_work_goes_on_though_nobody_reads_its_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Unread())
    with Progress(10, interval=0.0) as progress:
        progress.update(5)
        progress.update(10)
    assert progress.done == 10
    print_line("a warning")


def test_progress_follows_the_limit_that_is_reached_first():
    clock = Clock()
    progress = Progress(1000, time_limit=20, clock=clock, stream=io.StringIO())
    clock.seconds += 10
    progress.update(100)
    assert progress.fraction == pytest.approx(0.5)
    progress.update(900)
    assert progress.fraction == pytest.approx(0.9)
    clock.seconds += 100
    assert progress.fraction == 1


@pytest.mark.parametrize("numbers", [{}, {"return_mean": -1.5, "validated_score": 2.5}])
def test_a_terminal_of_80_columns_has_one_line(numbers):
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10**9, clock=clock, stream=stream)
    clock.seconds += 10
    progress.update(10**8, **numbers)
    progress._console = Console(file=stream, width=80)
    stream.truncate(0)
    stream.seek(0)
    progress._console.print(progress.display())
    (line,) = stream.getvalue().splitlines()
    assert len(line) <= 80


def test_a_table_leaves_out_columns_that_a_terminal_has_no_room_for(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    for stream, last in ((Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr("sys.stdout", stream)
        print_table(["head", "a", "b"], [["ada", "1" * 15, "2" * 15]], title="t")
        text = stream.getvalue()
        assert ("2" * 15 in text) is last
        assert "1" * 15 in text
        assert ("a wider terminal" in text) is not last


def test_a_table_leaves_out_the_least_important_columns_first(monkeypatch):
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream)
    columns, row = ["name", "a", "b", "c", "d"], ["x", *(c * 9 for c in "ABCD")]
    for width, kept in (("60", "ABCD"), ("50", "ABD"), ("40", "BD"), ("25", "B")):
        monkeypatch.setenv("COLUMNS", width)
        stream.truncate(0)
        print_table(columns, [row], title="t", drop_first=[3, 1])
        assert [c for c in "ABCD" if c * 9 in stream.getvalue()] == list(kept)


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(100, stream=stream) as progress:
        progress.update(50)
    assert "\x1b" not in stream.getvalue()
    assert "50 / 100 steps" in stream.getvalue()
