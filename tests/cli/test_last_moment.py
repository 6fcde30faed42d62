"""Signals between a command's last line and the end of its process."""

import subprocess
import sys

import pytest

COMMAND = """
import atexit, gc, os, signal, sys
from marl_pool.__main__ import main


def interrupt():
    os.kill(os.getpid(), signal.Signals[sys.argv[-1]])
    print(gc.get_freeze_count() > 0)


atexit.register(interrupt)
number = sys.argv.pop()
status = main()
sys.argv.append(number)
sys.exit(status)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
@pytest.mark.parametrize(("verb", "status"), [("list", 0), ("show", 2)])
def test_a_signal_does_not_change_the_status_of_what_has_ended(name, verb, status):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, verb, name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    # Python does not search all objects again for cycles.
    assert done.stdout.splitlines()[-1] == "True"
