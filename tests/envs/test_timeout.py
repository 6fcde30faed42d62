"""The time limit of an environment's calls."""

import subprocess
import sys
import threading
import time

import pytest

from helpers.campaign import EVOLVE
from helpers.faulty_envs import FaultyPole
from helpers.paths import ROOT
from marl_pool.cli import main as cli
from marl_pool.envs.timeout import EnvTimeoutError, env_call, limit_calls

LATE = r"a step of int took longer than 0.2 seconds, the limit env_timeout"


def test_a_call_that_hangs_is_interrupted_and_named():
    with limit_calls(0.2), pytest.raises(EnvTimeoutError, match=LATE):  # noqa: SIM117
        with env_call(3, "a step"):
            time.sleep(1000)


def test_calls_within_the_limit_and_time_between_them_are_left_alone():
    # A busy machine may hold a call up: the limit leaves it a second and a half.
    with limit_calls(1.5):
        for _ in range(3):
            with env_call(3, "a step"):
                time.sleep(0.01)
            time.sleep(0.5)
        time.sleep(1.6)


def test_without_a_limit_nothing_is_watched():
    with limit_calls(None), env_call(3, "a step"):
        assert not [t for t in threading.enumerate() if t.name == "env_timeout"]


def test_evolution_ends_in_one_line_and_keeps_its_checkpoint(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(FaultyPole, "taken", 0)
    path = tmp_path / "run"
    kept = [text for text in EVOLVE if not text.startswith(("env", "total"))]
    env = ["env=helpers.faulty_envs:FaultyPole", "+env.fault=hangs", "+env.after=90"]
    words = ["evolve", *kept, *env, "env_timeout=2", "--run-dir", str(path)]
    assert cli.main(words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "a step of FaultyPole took longer than 2 seconds" in line
    assert f"kept {path / 'checkpoints'}" in line
    assert "env_timeout" in line


HANGS = """
import threading, time
from marl_pool.envs import timeout

timeout.GRACE = 0.1
def call():
    with timeout.limit_calls(0.2, lambda reason: f"run: {reason}"):
        with timeout.env_call(3, "a reset"):
            time.sleep(1000)
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""


def test_a_process_that_cannot_be_interrupted_ends_with_the_line():
    ended = subprocess.run(
        [sys.executable, "-c", HANGS],
        capture_output=True,
        check=False,
        text=True,
        cwd=ROOT,
    )
    assert ended.returncode == 1
    assert "marl-pool: run: a reset of int took longer than 0.2" in ended.stderr
