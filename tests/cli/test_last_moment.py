"""Signals between a command's last line and the end of its process."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.training import PATIENCE

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
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, verb, name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    # Python does not search all objects again for cycles.
    assert result.stdout.splitlines()[-1] == "True"


HANGING = """
import sys, threading
from marl_pool.__main__ import main

sys.argv[1:] = ["list"]
status = main()
threading.Thread(target=threading.Event().wait).start()
print("waits", flush=True)
sys.exit(status)
"""


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_ends_a_process_that_waits_for_a_thread(name, status):
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True
    ) as process:
        assert "waits\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.Signals[name])
        try:
            assert process.wait(PATIENCE) == status
        finally:
            process.kill()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "marl_pool", "list", "pooling"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "output" in line
    assert "No space left" in line


def test_a_closed_output_is_no_fault():
    command = f"{shlex.quote(sys.executable)} -m marl_pool list pooling >&-"
    result = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
