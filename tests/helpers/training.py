"""Marks of tests that train on ray, and a wait for a training's progress."""

import subprocess
import time
from pathlib import Path

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
