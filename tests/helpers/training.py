"""Marks of tests that train on ray, and a wait for a training's progress."""

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

RAY_WARNINGS = [
    # Ray's own warnings are not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PATIENCE = 300.0
"""Seconds after which a process counts as hanging, also on a busy machine."""


def wait_for_rows(run: Path, process: subprocess.Popen, count: int) -> None:
    """Wait until a training has logged more than ``count`` iterations."""
    file, end = run / "metrics.csv", time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if file.is_file() and file.read_text().count("\n") > count:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.kill()
    pytest.fail("no rows")


# Functions for learners: their processes import helpers, but no test module.


def take_its_disk(learner: Any) -> None:
    """Let a learner neither write nor read checkpoints, as on another machine."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    learner.save_to_path = learner.restore_from_path = None


def kill_it(learner: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
