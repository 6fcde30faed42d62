"""Settings of all tests."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from helpers.paths import ROOT

# No test fails for being slow on a shared machine. `quick` tries the same examples in
# each run, for a merge must not fail by chance; `thorough` tries new ones in each.
common = {"deadline": None, "print_blob": True}
settings.register_profile("quick", max_examples=15, derandomize=True, **common)
settings.register_profile("thorough", max_examples=100, derandomize=False, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Threads that wait for each other on a busy machine cost more than they gain here.
torch.set_num_threads(1)

# Processes that tests start import this package, and the worlds of `helpers`.
inherited = os.environ.get("PYTHONPATH")
folders = [str(ROOT / "tests"), str(ROOT), *([inherited] if inherited else [])]
os.environ["PYTHONPATH"] = os.pathsep.join(folders)


@pytest.fixture(scope="module")
def cluster() -> None:
    """A ray of four CPUs, shared by all tests of this process that train on one."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)


@pytest.fixture(scope="module")
def no_cluster() -> None:
    """No ray, as where a command starts; what another module left is shut down."""
    pytest.importorskip("ray").shutdown()


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where pytest was started without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
