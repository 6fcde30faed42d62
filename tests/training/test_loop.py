"""The training loop: callbacks, the log to Weights & Biases, origins of checkpoints."""

import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from helpers.tables import yaml_cases
from helpers.wind_env import WINDY
from marl_pool.cli import main as cli
from marl_pool.runs.run import Run
from marl_pool.training import loop
from marl_pool.training.callbacks import Callback, WandB

TINY = [*WINDY, "total_generations=4", "--run-dir", "run"]
MODULE = "training.test_loop"


class EventRecorder(Callback):
    """Record a run's events in a list of this module."""

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
    monkeypatch.setitem(sys.modules, MODULE, sys.modules[__name__])
    EventRecorder.events.clear()


def evolve(callbacks: str) -> int:
    return cli.main(["evolve", *TINY, f"callbacks={callbacks}"])


def resume(*plugins: str, overrides: Sequence[str] = ()) -> int:
    words = [f"--plugin={plugin}" for plugin in ("helpers.wind_env:WindEnv", *plugins)]
    return cli.main(["resume", "run", *words, *overrides])


def test_callbacks_follow_a_run_and_end_it():
    assert evolve(f"[{MODULE}:EventRecorder,{MODULE}:StopsAtTwo]") == 0
    assert EventRecorder.events == ["begin", 1, 2, "end"]
    assert Run.open("run").last_saved_iteration == 2
    # What a file names is not imported unless the user allows it.
    assert resume(f"{MODULE}:EventRecorder") == 2
    assert EventRecorder.events[4:] == []
    assert resume(f"{MODULE}:EventRecorder", f"{MODULE}:StopsAtTwo") == 0
    assert EventRecorder.events[4:] == ["begin", 3, 4, "end"]
    # A resumed run may change its callbacks.
    assert resume(overrides=["callbacks=[]", "total_generations=5"]) == 0
    assert Run.open("run").last_saved_iteration == 5
    assert EventRecorder.events[8:] == []


@pytest.mark.parametrize("limit", ["60", "null"])
def test_a_run_that_a_callback_ended_continues_only_by_resume(capsys, limit):
    job = ["evolve", *TINY, "--or-resume", f"time_limit={limit}"]
    job.append(f"callbacks=[{MODULE}:EventRecorder,{MODULE}:StopsAtTwo]")
    assert cli.main(job) == 0
    assert "time_limit is over" not in capsys.readouterr().err
    assert cli.main(job) == 0
    said = "2 of 4 generations are done, and a callback ended the run; nothing to do"
    assert said in capsys.readouterr().out
    assert EventRecorder.events == ["begin", 1, 2, "end"]
    assert resume(f"{MODULE}:EventRecorder", f"{MODULE}:StopsAtTwo") == 0
    assert Run.open("run").last_saved_iteration == 4


@yaml_cases("name, iteration, saved")
def test_a_callback_that_fails_ends_the_run_in_one_line(capsys, name, iteration, saved):
    assert evolve(f"[{MODULE}:{name}]") == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    last = error.splitlines()[-1]
    assert f"iteration {iteration}: a callback failed: RuntimeError: no network" in last
    run = Run.open("run")
    assert "no\nnetwork" in (run.path / "error.txt").read_text()
    assert (len(run.rows()), run.last_saved_iteration) == (iteration, saved)


@pytest.mark.parametrize("name", ["FailsToEnd", "Swallows"])
def test_a_session_does_not_hide_what_ended_the_run(capsys, name):
    assert evolve(f"[{MODULE}:{name},{MODULE}:Fails]") == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert "iteration 2: a callback failed: RuntimeError: no network" in last
    has_note = any("a callback failed, too" in line for line in lines)
    assert has_note == (name == "FailsToEnd")


@pytest.mark.parametrize("name", ["wanb", f"{MODULE}:NoSuch"])
def test_a_sweep_refuses_callbacks_before_it_writes_anything(refused, tmp_path, name):
    pytest.importorskip("ray")
    words = ["pooling=max", "seed=0,1", f"callbacks=[{name}]", "--sweep-dir", "sweep"]
    error = refused("sweep", *words)
    assert "callback" in error
    assert name.rpartition(":")[2] in error
    assert not list(tmp_path.iterdir())


@yaml_cases("callbacks, parts")
def test_wrong_callbacks_are_refused(refused, monkeypatch, callbacks, parts, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = refused("evolve", *TINY, f"callbacks={callbacks}")
    for part in parts:
        assert part in error
    assert not list(tmp_path.iterdir())


def test_a_run_is_logged_to_wandb_and_its_log_continues(monkeypatch, tmp_path):
    sessions, rows, finished = [], [], []
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def init(**options):
        sessions.append(options)
        return SimpleNamespace(
            log=lambda row, step: rows.append((step, row["env_steps"])),
            finish=lambda: finished.append(True),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert evolve("[wandb]") == 0
    assert resume(overrides=["total_generations=5"]) == 0
    first, second = sessions
    assert (first["name"], first["dir"]) == ("run", tmp_path / "run")
    assert first["project"] == "marl_pool"
    assert first["config"]["total_generations"] == 4
    assert (first["id"], first["resume"]) == (second["id"], "allow")
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5]
    env_steps = [row["env_steps"] for row in Run.open("run").rows()]
    assert [steps for _, steps in rows] == env_steps
    assert len(finished) == 2


@pytest.mark.parametrize(
    "name", ["env=mine:Env,seed=0", "a/b#c?'d';e", "größe", "seed=0"]
)
def test_an_id_at_wandb_has_only_characters_that_it_accepts(
    monkeypatch, tmp_path, name
):
    sessions = []

    def init(**options):
        sessions.append(options)
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = SimpleNamespace(path=tmp_path / name.replace("/", "-"), config={})
    with WandB().session(run):
        pass
    (options,) = sessions
    assert options["name"] == run.path.name
    assert not set(options["id"]) & set(":;,#?/'\\\\%")
    # Names that W&B accepts keep their ids, so that older runs continue their logs.
    assert options["id"].startswith(name) == (name in ("größe", "seed=0"))


# The origin of a checkpoint, and the line printed when a run is resumed elsewhere


@pytest.fixture
def run(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(loop, "describe_kernels", lambda device: "native (v4)")
    assert evolve("[]") == 0
    capsys.readouterr()
    return Run.open("run")


def test_no_change_and_no_record_are_not_mentioned(run, capsys, monkeypatch):
    origin = run.origin(run.latest_checkpoint())
    assert origin.keys() == {"kernels", "marl_pool", "torch"}
    assert resume(overrides=["total_generations=5"]) == 0
    monkeypatch.setattr(Run, "origin", lambda *_: {})
    assert resume(overrides=["total_generations=6"]) == 0
    assert "is now" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("describe_kernels", lambda _: "torch", "native (v4) is now torch, threads=1"),
        ("__version__", "9.9.9", " is now 9.9.9"),
        ("torch.__version__", "1.0", " is now 1.0"),
    ],
)
@pytest.mark.usefixtures("run")
def test_a_change_is_reported_once(capsys, monkeypatch, name, value, message):
    monkeypatch.setattr(f"{loop.__name__}.{name}", value)
    for number in (5, 6):
        assert resume(overrides=[f"total_generations={number}"]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert sum(message in line for line in lines) == (number == 5)
