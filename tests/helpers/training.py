"""Marks and helpers for tests that train on Ray or start other processes."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RAY_WARNINGS = [
    # Ray's own warnings are not ours to fix.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PATIENCE = 300.0
"""Seconds after which a process counts as hanging, also on a busy machine."""
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run Python in another process; return its status and, as text, its output.

    ``options`` are `subprocess.run`'s.
    """
    command = [sys.executable, *map(str, arguments)]
    options = {**PIPES, "text": True, "timeout": PATIENCE, **options}
    return subprocess.run(command, check=False, **options)


def start_python(*arguments: object, **options: Any) -> subprocess.Popen[Any]:
    """Start Python in another process, with pipes for its output."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, **{**PIPES, "text": True, **options})


def wait_for_rows(run: Path, process: subprocess.Popen, count: int) -> None:
    """Wait until a training run has logged at least ``count`` iterations."""
    file, end = run / "metrics.csv", time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if file.is_file() and file.read_text().count("\n") > count:
            return
        assert process.poll() is None, (process.stderr or process.stdout).read()
        time.sleep(0.05)
    process.kill()
    pytest.fail("no rows")


# Run in learners: their processes can import helpers, but no test module.


def block_checkpoints(learner: Any) -> None:
    """Stop a learner from writing and reading checkpoints, as on another machine."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    learner.save_to_path = learner.restore_from_path = None


def kill_learner(learner: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
