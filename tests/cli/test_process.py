"""The process of a command: its first line, its threads, signals, and its end."""

import os
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from helpers.training import PATIENCE, run_python, start_python
from marl_pool import __main__ as command
from marl_pool.cli import main as cli


@pytest.mark.parametrize("verb", ["train", "resume"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_a_line_at_once(monkeypatch, capsys, verb, is_terminal):
    messages = []

    def run(*arguments: object) -> int:
        messages.append(capsys.readouterr().err)
        return 0

    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setitem(cli.VERBS, verb, run)
    assert cli.main([verb]) == 0
    assert messages == [f"marl-pool {verb}: starting\n" if is_terminal else ""]


@pytest.mark.parametrize(
    ("variables", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_of_the_command_spin_briefly(monkeypatch, variables, spins):
    """While they wait for each other, unless the user has set something else."""
    first_import = types.ModuleType("marl_pool.cli.main")
    first_import.main = lambda: os.environ.get("GOMP_SPINCOUNT")
    monkeypatch.setitem(sys.modules, first_import.__name__, first_import)
    monkeypatch.setattr("marl_pool.training.signals.prepare_exit", lambda: None)
    monkeypatch.setattr(os, "environ", dict(variables))
    assert command.main() == spins


COMMAND = """
import atexit, gc, os, signal, sys
from marl_pool.__main__ import main


def interrupt():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(os.getpid(), number)
    print(gc.get_freeze_count() > 0)


atexit.register(interrupt)
sys.exit(main())
"""


@pytest.mark.parametrize(("verb", "status"), [("list", 0), ("show", 2)])
def test_late_signals_do_not_change_the_status(verb, status):
    """Between a command's last line and the end of its process."""
    result = run_python("-c", COMMAND, verb)
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
    with start_python("-c", HANGING) as process:
        assert "waits\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.Signals[name])
        try:
            assert process.wait(PATIENCE) == status
        finally:
            process.kill()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        result = run_python("-m", "marl_pool", "list", "pooling", stdout=full)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "output" in line
    assert "No space left" in line


def test_a_closed_output_is_no_fault():
    command = f"{shlex.quote(sys.executable)} -m marl_pool list pooling >&-"
    result = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
