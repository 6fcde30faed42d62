"""Configuration and fixtures shared by all tests."""

import gc
import logging
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# Spinning threads take the core from the threads they wait for. Read when torch is
# loaded, also by processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from hypothesis import settings

from helpers.paths import ROOT

# No deadline, since a shared machine may be slow. `quick` and `thorough` try the same
# examples in each run, so that no merge fails by chance; `explore` tries new ones.
common = {"deadline": None, "print_blob": True}
settings.register_profile("quick", max_examples=15, derandomize=True, **common)
settings.register_profile("thorough", max_examples=40, derandomize=True, **common)
settings.register_profile("explore", max_examples=200, derandomize=False, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Processes that tests start import this package and the environments in `helpers`.
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
"""Folders of unit tests without training runs, commands or simulators: `make fast`."""
LONGEST = "training/sweep/test_sweep_training.py"
"""The file that starts first: a worker runs whole files, and this one takes long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path != ROOT / "tests" / LONGEST)
    for item in items:
        if item.path.parent.relative_to(ROOT / "tests").as_posix() in FAST:
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """Exempt modules and tests, which live until the end, from garbage collection."""
    gc.collect()
    gc.freeze()


COVERAGE = "COVERAGE_PROCESS_CONFIG"
"""Environment variable that makes coverage measure processes that tests start."""
TRACED = 4
"""Under coverage, one in this many of the repetitive tests is traced."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under coverage, trace a share of the repetitive tests, and all others.

    Tracing doubles the duration. Slow tests, cases of a parametrised test and examples
    of a property mostly run lines that others run too. The choice depends on the full
    node id, so tests with the same parameters trace different cases. The measured
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


def reset_global_state() -> None:
    """Undo what an earlier test, or its training run, left in global state.

    Random numbers then depend neither on the order of the tests nor on the worker.
    Training sets torch's number of threads; on a busy machine, threads that wait for
    each other cost the following tests several times more than they gain.
    """
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    logging.disable(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    reset_global_state()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    reset_global_state()


@pytest.fixture(scope="module")
def cluster() -> None:
    """A local Ray with four CPUs, shared by all tests of this process that need one."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        options = {"include_dashboard": False, "log_to_driver": False}
        ray.init(address="local", num_cpus=4, **options)


@pytest.fixture(scope="module")
def no_cluster() -> Iterator[None]:
    """No running Ray: as when a command starts, and none is left for other modules."""
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
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command that must fail and returns its error line."""
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
