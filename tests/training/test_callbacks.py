"""Callbacks of runs, and the log to Weights & Biases."""

import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from marl_pool.cli import main as cli
from marl_pool.runs.run import Run
from marl_pool.training.callbacks import Callback

TINY = [
    *("env=helpers.wind_env:WindEnv", "policy=feed_forward", "policy.hidden=[3]"),
    *("evolution.population=6", "repetitions=2", "total_generations=4"),
    *("validation.episodes=2", "threads=1", "--run-dir", "run"),
]
OWN = "training.test_callbacks"


class EventRecorder(Callback):
    """Record what a run tells, in a list of this module."""

    events: list = []  # noqa: RUF012

    @contextmanager
    def session(self, run):
        self.events.append("begin")
        yield
        self.events.append("end")

    def on_iteration(self, run, row):
        assert run.metrics.last == row
        self.events.append(int(row["iteration"]))


class StopsAtTwo(Callback):
    def on_iteration(self, run, row):
        return row["iteration"] == 2


class Fails(Callback):
    def on_iteration(self, run, row):
        if row["iteration"] == 2:
            raise RuntimeError("no\nnetwork")


class FailsToBuild(Callback):
    def __init__(self):
        raise RuntimeError("no\nnetwork")


class FailsToBegin(Callback):
    @contextmanager
    def session(self, run):
        raise RuntimeError("no\nnetwork")
        yield


class FailsToEnd(Callback):
    @contextmanager
    def session(self, run):
        try:
            yield
        finally:
            raise RuntimeError("no\nnetwork")


class Swallows(Callback):
    @contextmanager
    def session(self, run):
        with suppress(Exception):
            yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The command imports this module by its name.
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])
    EventRecorder.events.clear()


def evolve(callbacks: str) -> int:
    return cli.main(["evolve", *TINY, f"callbacks={callbacks}"])


def resume(*plugins: str, overrides: Sequence[str] = ()) -> int:
    words = [f"--plugin={plugin}" for plugin in ("helpers.wind_env:WindEnv", *plugins)]
    return cli.main(["resume", "run", *words, *overrides])


def test_callbacks_follow_a_run_and_end_it():
    assert evolve(f"[{OWN}:EventRecorder,{OWN}:StopsAtTwo]") == 0
    assert EventRecorder.events == ["begin", 1, 2, "end"]
    assert Run.open("run").iterations_saved == 2
    # What a file names is not imported unless the user allows it.
    assert resume(f"{OWN}:EventRecorder") == 2
    assert EventRecorder.events[4:] == []
    assert resume(f"{OWN}:EventRecorder", f"{OWN}:StopsAtTwo") == 0
    assert EventRecorder.events[4:] == ["begin", 3, 4, "end"]


def test_a_resumed_run_may_change_its_callbacks():
    assert evolve(f"[{OWN}:StopsAtTwo]") == 0
    assert resume(overrides=["callbacks=[]"]) == 0
    assert Run.open("run").iterations_saved == 4


def test_a_failed_callback_ends_the_run_in_one_line(capsys):
    assert evolve(f"[{OWN}:Fails]") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "iteration 2" in error
    assert "RuntimeError: no network" in error
    assert "no\nnetwork" in (Run.open("run").path / "error.txt").read_text()


@pytest.mark.parametrize(
    ("name", "rows"), [("FailsToBuild", 0), ("FailsToBegin", 0), ("FailsToEnd", 4)]
)
def test_a_callback_that_fails_around_a_run_ends_it_in_one_line(capsys, name, rows):
    assert evolve(f"[{OWN}:{name}]") == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert f"iteration {rows}: a callback failed: RuntimeError: no network" in last
    run = Run.open("run")
    assert "no\nnetwork" in (run.path / "error.txt").read_text()
    assert len(run.rows()) == run.iterations_saved == rows


@pytest.mark.parametrize("name", ["FailsToEnd", "Swallows"])
def test_a_session_does_not_hide_what_ended_the_run(capsys, name):
    assert evolve(f"[{OWN}:{name},{OWN}:Fails]") == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert "iteration 2: a callback failed: RuntimeError: no network" in last
    has_note = any("a callback failed, too" in line for line in lines)
    assert has_note == (name == "FailsToEnd")


@pytest.mark.parametrize("name", ["wanb", f"{OWN}:NoSuch"])
def test_a_sweep_refuses_callbacks_before_it_writes_anything(capsys, tmp_path, name):
    pytest.importorskip("ray")
    words = ["pooling=max", "seed=0,1", f"callbacks=[{name}]", "--sweep-dir", "sweep"]
    assert cli.main(["sweep", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "callback" in error
    assert name.rpartition(":")[2] in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("callbacks", "parts"),
    [
        ("[wanb]", ["unknown callback 'wanb'", "wandb"]),
        ("wandb", ["callbacks: expected a list", "'wandb'"]),
        ("[no.such:Thing]", ["callback 'no.such:Thing' cannot be imported"]),
        (f"[{OWN}:Run]", ["must be a subclass of", "training.callbacks.Callback"]),
        ("[wandb]", ['pip install "marl-pool[wandb]"']),
    ],
)
def test_wrong_callbacks_are_refused(capsys, monkeypatch, callbacks, parts, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert evolve(callbacks) == 2
    error = capsys.readouterr().err
    for part in parts:
        assert part in error
    assert not list(tmp_path.iterdir())


def test_a_run_is_logged_to_wandb_and_its_log_continues(monkeypatch, tmp_path):
    made, rows, finished = [], [], []
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def init(**options):
        made.append(options)
        return SimpleNamespace(
            log=lambda row, step: rows.append((step, row["env_steps"])),
            finish=lambda: finished.append(True),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert evolve("[wandb]") == 0
    assert resume(overrides=["total_generations=5"]) == 0
    first, second = made
    assert (first["name"], first["dir"]) == ("run", tmp_path / "run")
    assert first["project"] == "marl_pool"
    assert first["config"]["total_generations"] == 4
    assert (first["id"], first["resume"]) == (second["id"], "allow")
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5]
    assert [row["env_steps"] for row in Run.open("run").rows()] == [
        steps for _, steps in rows
    ]
    assert len(finished) == 2
