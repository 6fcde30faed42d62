"""One-line errors name the line of the user's code."""

import errno
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.rule_breaker import Breaker
from marl_pool.cli import main as cli
from marl_pool.envs.drawing.frames import to_rgb
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.timeout import EnvExitError, env_call
from marl_pool.evaluation.computing import computing
from marl_pool.files import atomic
from marl_pool.runs.run import Run
from marl_pool.utils.errors import (
    InputError,
    StoppedError,
    described,
    explain_os_errors,
    foreign,
    place,
)

MODULE = "helpers.rule_breaker:Breaker"


class Careless(Breaker):
    """An env that raises in its own code, in NumPy's or in this package's."""

    def step(self, actions):
        if self.fault == "numpy":
            return np.concatenate([np.zeros(3), np.zeros((2, 2))])
        if self.fault == "package":
            return to_rgb(None)
        raise KeyError


@pytest.mark.parametrize(
    ("fault", "begin"),
    [
        ("own", "KeyError ("),
        ("numpy", "ValueError: all the input array"),
        ("package", "InputError: expected an array of numbers, got None ("),
    ],
)
def test_an_error_has_the_user_s_innermost_line(monkeypatch, fault, begin):
    env = PettingZooEnv(1, module=f"{__name__}:Careless", options={"fault": fault})
    env.reset()
    with pytest.raises((KeyError, ValueError)) as caught:
        env.step({name: env.active[name].long() for name in env.groups})
    line = described(caught.value)
    assert line.startswith(begin)
    source = Path(__file__).read_text().splitlines()
    number = int(line.rpartition(":")[2].removesuffix(")"))
    assert {"own": "KeyError", "numpy": "concatenate", "package": "to_rgb"}[
        fault
    ] in source[number - 1]
    # A path is relative to the working directory, if it is in it.
    assert str(Path(__file__).relative_to(Path.cwd())) in line
    monkeypatch.chdir("/")
    assert str(Path(__file__).relative_to("/")) in place(caught.value)


def test_errors_of_this_package_alone_have_no_place():
    with pytest.raises(InputError) as caught:
        PettingZooEnv(1, module="json:nothing")
    assert place(caught.value) == ""


def test_an_env_that_raises_ends_an_evaluation_in_one_line():
    env = PettingZooEnv(1, module=MODULE, options={"fault": "raises"})
    env.reset()
    with (
        pytest.raises(StoppedError) as caught,
        computing(None),
        env_call(env, "a step"),
    ):
        env.step({name: env.active[name].long() for name in env.groups})
    line = str(caught.value)
    assert line.startswith("RuntimeError: the door is shut (")
    assert line.endswith("), raised by a step of PettingZooEnv")
    assert "helpers/rule_breaker.py:" in line


def test_other_errors_than_an_env_s_are_not_hidden():
    with pytest.raises(KeyError), computing(None):
        raise KeyError("a bug")


class Fatal(BaseException):
    """An exception that would end a process."""


@pytest.mark.parametrize(
    ("fatal", "message"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (Fatal(), "Fatal"),
        (Fatal("gone"), "gone"),
        (StopIteration("no map is left"), "StopIteration: no map is left"),
    ],
)
def test_exceptions_that_would_exit_become_env_errors(fatal, message):
    def fail():
        raise fatal

    with pytest.raises(EnvExitError, match=message) as caught, env_call(None, "a step"):
        fail()
    assert Path(__file__).name in traceback_files(caught.value)
    with pytest.raises(KeyboardInterrupt), env_call(None, "a step"):
        raise KeyboardInterrupt


def traceback_files(error):
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(Path(trace.tb_frame.f_code.co_filename).name)
        trace = trace.tb_next
    return files[1:]  # below this file's own call


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "full", "/disk/file"), "/disk/file: full"),
        (OSError(errno.EROFS, "read-only"), "read-only"),
        (OSError(errno.ELOOP, "too many links", "/a/b"), "/a/b: too many links"),
        (FileNotFoundError(errno.ENOENT, "none", "/disk/file"), ""),
        (MemoryError(), "out of memory: MemoryError"),
        (
            RuntimeError("[enforce fail] can't allocate memory: 9 bytes"),
            "out of memory: ",
        ),
        (RuntimeError("a bug"), ""),
    ],
)
def test_faults_of_the_machine_are_one_line(monkeypatch, capsys, error, message):
    line = foreign(error)
    assert line.startswith(message)
    assert bool(line) == bool(message)

    def fail(*arguments):
        raise error

    monkeypatch.setitem(cli.VERBS, "ls", fail)
    if not message:
        with pytest.raises(type(error)):
            cli.main(["ls"])
        return
    assert cli.main(["ls"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"marl-pool: {message}")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left"), "No space left"),
        (shutil.Error("a and b are\nthe same file"), "a and b are the same file"),
        (OSError(), "OSError"),
    ],
)
def test_the_reason_of_an_error_of_the_system_is_named(error, reason):
    with pytest.raises(InputError) as caught, explain_os_errors("x cannot be made"):
        raise error
    assert str(caught.value) == f"x cannot be made: {reason}"


def test_a_module_that_ends_the_process_has_a_line(monkeypatch, capsys):
    monkeypatch.setitem(cli.VERBS, "ls", lambda *_: sys.exit(3))
    assert cli.main(["ls"]) == 1
    near = f"(tests/utils/{Path(__file__).name}:"
    assert f"marl-pool: SystemExit: 3 {near}" in capsys.readouterr().err


def test_a_full_disk_names_the_file_and_no_clean_up_hides_it(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    file = atomic.new_file(tmp_path / "page.html")
    with pytest.raises(OSError, match="No space") as caught, file:
        raise OSError(errno.ENOSPC, "No space left")
    assert caught.value.filename == str(tmp_path / "page.html")
    missing = tmp_path / "nowhere" / "page.html"
    with pytest.raises(FileNotFoundError) as caught, atomic.new_file(missing):
        pass
    assert caught.value.filename == str(missing)


def test_an_error_of_undecodable_names_is_kept(tmp_path):
    run = Run.create(tmp_path / "run", {})
    file = run.write_error("no file \udcff.xml")
    assert file.read_text() == "no file \\udcff.xml\n"
