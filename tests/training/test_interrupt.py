"""Ctrl-C, as a user presses it, and SIGTERM, as a scheduler sends it."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray")

from helpers.training import PATIENCE, start_python, wait_for_rows
from marl_pool.cli.main import main
from marl_pool.runs.run import Run
from marl_pool.training.signals import Interruptible, Terminated, patience

SMALL = [
    *("env.num_noise=2", "env.max_steps=8", "encoder.num_layers=1", "ppo.num_envs=4"),
    *("ppo.batch_size=32", "ppo.minibatch_size=32", "ppo.num_epochs=1", "threads=1"),
]


def stopped(path: Path, number: signal.Signals, command: list[str]) -> int:
    """Send a signal to a training run; return the iteration that it saved."""
    logged = len(Run.open(path).rows()) if path.exists() else 0
    process = start_python("-m", "marl_pool", *command)
    wait_for_rows(path, process, logged + 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, errors
    assert f"marl-pool: stopped; resume with: marl-pool resume {path}" in errors
    assert "Traceback" not in errors
    run = Run.open(path)
    iteration = int(run.rows()[-1]["iteration"])
    assert iteration > logged
    assert run.latest_checkpoint().name == f"iter_{iteration:06d}"
    assert (run.policy_dir / "config.json").is_file()
    return iteration


@pytest.mark.slow
def test_a_signal_leaves_a_run_that_resumes(tmp_path, capsys):
    path = tmp_path / "run"
    endless = ["--num-env-runners=1", "total_steps=10_000_000"]
    train = ["train", "--run-dir", str(path), *SMALL, *endless]
    stopped(path, signal.SIGTERM, train)
    iteration = stopped(path, signal.SIGINT, ["resume", str(path)])
    overrides = [f"total_steps={32 * (iteration + 2)}", "resources.num_env_runners=0"]
    for _ in range(2):
        assert main(["resume", str(path), *overrides]) == 0
        iterations = [row["iteration"] for row in Run.open(path).rows()]
        assert iterations == list(range(1, iteration + 3))
    assert "steps are done; nothing to do" in capsys.readouterr().out


def test_sigterm_after_the_warning_lets_the_checkpoint_be_saved():
    with Interruptible() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(Terminated, match=str(signal.SIGUSR1.value)):
        signals.raise_if_requested()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGUSR1])
def test_a_second_sigterm_stops_at_once_whatever_came_first(first):
    with Interruptible():
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated, match=str(signal.SIGTERM.value)):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_says_what_happens_and_the_second_stops(capfd, number):
    before = signal.getsignal(number)
    with Interruptible() as signals:
        signal.raise_signal(number)
        assert signals.requested
        assert "stopping after this iteration" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(number)
    assert isinstance(caught.value, Terminated) == (number != signal.SIGINT)
    assert signal.getsignal(number) == before


@contextmanager
def broken_stderr():
    """A standard error whose reader is gone, as Ctrl-C ends ``tee``."""
    saved, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(writer)


def test_a_signal_is_noted_though_nobody_reads_the_line():
    with broken_stderr(), Interruptible() as signals:
        signal.raise_signal(signal.SIGINT)
    assert signals.requested


def test_a_wait_goes_on_though_nobody_reads_the_line():
    with broken_stderr(), patience("a block", limit=60):
        signal.raise_signal(signal.SIGALRM)
