"""Settings of all tests."""

import gc
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# Threads that spin while they wait take the core from those they wait for. It is read
# when torch is loaded, also by processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from hypothesis import settings

from helpers.paths import ROOT

# No test fails for being slow on a shared machine. `quick` and `thorough` try the same
# examples in each run, for a merge must not fail by chance; `explore` tries new ones.
common = {"deadline": None, "print_blob": True}
settings.register_profile("quick", max_examples=15, derandomize=True, **common)
settings.register_profile("thorough", max_examples=40, derandomize=True, **common)
settings.register_profile("explore", max_examples=200, derandomize=False, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Processes that tests start import this package, and the environments of `helpers`.
inherited = os.environ.get("PYTHONPATH")
folders = [str(ROOT / "tests"), str(ROOT), *([inherited] if inherited else [])]
os.environ["PYTHONPATH"] = os.pathsep.join(folders)

FAST = (
    "encoders",
    "envs/particles",
    "evaluation/statistics",
    "kernels",
    "networks",
    "observations",
    "perturbations",
    "policies",
    "pooling",
    "utils",
)
"""Folders of unit tests, without trainings, commands and simulators: `make fast`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.relative_to(ROOT / "tests").as_posix() in FAST:
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """Exempt what lives until the end, modules and tests, from garbage collection."""
    gc.collect()
    gc.freeze()


COVERAGE = "COVERAGE_PROCESS_CONFIG"
"""Environment variable by which coverage measures processes that tests start."""
TRACED = 4
"""With coverage, one in this many of the tests that repeat others is traced."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Trace a share of the tests that repeat others, and all others.

    Tracing takes as long again as the tests. Slow tests, cases of a parametrised test
    and examples of a property mostly run lines that others run too. The choice follows
    from the whole name, so tests with the same parameters trace different cases. The
    coverage is a lower bound.
    """
    marked = map(item.get_closest_marker, ("slow", "hypothesis"))
    repeats = hasattr(item, "callspec") or any(marked)
    traced = not repeats or zlib.crc32(item.nodeid.encode()) % TRACED == 0
    if traced or COVERAGE not in os.environ:
        return (yield)
    config = os.environ.pop(COVERAGE)
    trace, trace_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        threading.settrace(trace_of_threads)
        sys.settrace(trace)
        os.environ[COVERAGE] = config


def start_afresh() -> None:
    """Undo what an earlier test, or its training, left in global states.

    Random numbers then depend neither on the order of the tests nor on the worker. A
    training sets torch's threads: those that wait for each other on a busy machine
    cost the tests after it several times more than they gain.
    """
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    start_afresh()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    start_afresh()


@pytest.fixture(scope="module")
def cluster() -> None:
    """A ray of four CPUs, shared by all tests of this process that train on one."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        options = {"include_dashboard": False, "log_to_driver": False}
        ray.init(address="local", num_cpus=4, **options)


@pytest.fixture(scope="module")
def no_cluster() -> Iterator[None]:
    """No ray, as where a command starts, nor one that another module would find."""
    ray = pytest.importorskip("ray")
    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where pytest was started without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail; return its one line."""
    from marl_pool.cli import main as cli

    def run(*arguments: str, status: int = 2) -> str:
        capsys.readouterr()
        assert cli.main(arguments) == status
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("marl-pool: ")
        assert err.count("\n") == 1
        return err

    return run
