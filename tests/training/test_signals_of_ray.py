"""Signals while Ray starts and ends, which would crash the process."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest

ray = pytest.importorskip("ray")

from ray import _raylet
from ray._private import utils, worker

from helpers.training import PATIENCE, RAY_WARNINGS
from marl_pool.training import cluster
from marl_pool.training.signals import Terminated, exit_status, terminable

pytestmark = RAY_WARNINGS


@pytest.mark.parametrize(
    ("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)]
)
def test_a_signal_waits_for_the_start_and_ray_is_left(monkeypatch, capfd, name, status):
    events = []

    def init(**options):
        # Ray's own handler would exit in the midst of its start.
        utils.set_sigterm_handler(lambda number, frame: events.append("killed"))
        os.kill(os.getpid(), signal.Signals[name])
        events.append("started")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: events.append("left"))
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        terminable(),
        cluster.ray_session(None, num_cpus=1),
    ):
        events.append("used")
    assert exit_status(caught.value) == status
    assert isinstance(caught.value, Terminated) == (name != "SIGINT")
    assert events == ["started", "left"]
    # What Ray's C++ code prints is hidden, and this is not.
    assert "stopping after Ray's start or end" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_call_of_ray_hides_no_signal():
    """A blocking call raises its own KeyboardInterrupt in place of `Terminated`."""
    with terminable(), pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_status(KeyboardInterrupt()) == 143
    # A later command of the process is stopped by Ctrl-C.
    with terminable():
        assert exit_status(KeyboardInterrupt()) == 130


def test_ray_has_the_functions_that_set_its_handlers():
    assert "set_sigterm_handler" in worker.init.__wrapped__.__code__.co_names
    library = ctypes.CDLL(_raylet.__file__)
    assert getattr(library, cluster.TAKE_SIGNALS)
    assert getattr(library, cluster.LEAVE_SIGNALS)


SESSION = """
import os, signal, sys
import ray
from marl_pool.training.cluster import ray_session
from marl_pool.training.signals import exit_status, terminable


class Core(ray._raylet.CoreWorker):
    def __init__(self, *arguments):
        if "start" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)

    def shutdown_driver(self):
        super().shutdown_driver()
        if "end" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)


ray._raylet.CoreWorker = Core
try:
    with terminable(), ray_session(None, num_cpus=1):
        print("used")
except KeyboardInterrupt as error:
    sys.exit(exit_status(error))
"""
"""Program that gets a SIGTERM when Ray's C++ code has changed the handlers."""


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(("moment", "used"), [("start", ""), ("end", "used\n")])
def test_rays_own_handling_of_sigterm_ends_no_process(moment, used):
    result = subprocess.run(
        [sys.executable, "-c", SESSION, moment],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert result.returncode == 143, result.stderr
    assert result.stdout == used


GROUP = """
import os, signal, sys
from marl_pool.training.cluster import ray_session
from marl_pool.training.last_words import descendants
from marl_pool.training.signals import Interruptible
import ray

with ray_session(None, num_cpus=1), Interruptible() as stop:
    os.killpg(0, signal.SIGTERM)
    assert ray.get(ray.remote(lambda: "alive").remote()) == "alive"
    assert descendants(os.getpid())
    print(stop.requested)
"""
"""Program that signals its own group, as `timeout` and a shell do."""


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster")
def test_a_signal_to_the_group_leaves_ray_running():
    result = subprocess.run(
        [sys.executable, "-c", GROUP],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        start_new_session=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"
