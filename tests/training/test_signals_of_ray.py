"""Signals while Ray starts, which would crash the process if they interrupted it."""

import os
import signal

import pytest

ray = pytest.importorskip("ray")

from ray._private import utils, worker

from helpers.training import RAY_WARNINGS
from marl_pool.training import cluster
from marl_pool.training.signals import Terminated, exit_status, terminable

pytestmark = RAY_WARNINGS


@pytest.mark.parametrize(
    ("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)]
)
def test_a_signal_waits_for_the_start_and_ray_is_left(monkeypatch, name, status):
    done = []

    def init(**options):
        # Ray's own handler would exit in the midst of its start.
        utils.set_sigterm_handler(lambda number, frame: done.append("killed"))
        os.kill(os.getpid(), signal.Signals[name])
        done.append("started")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("left"))
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        terminable(),
        cluster.ray_session(None, num_cpus=1),
    ):
        done.append("used")
    assert exit_status(caught.value) == status
    assert isinstance(caught.value, Terminated) == (name != "SIGINT")
    assert done == ["started", "left"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ray_has_the_function_that_sets_its_handler():
    assert "set_sigterm_handler" in worker.init.__wrapped__.__code__.co_names
