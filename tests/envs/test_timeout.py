"""The time limit of an environment's calls."""

import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from helpers.campaign import CLONE, EVOLVE
from helpers.faulty_pole import FaultyPole
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


def limit(fault: str) -> list[str]:
    return ["env_timeout=2"] if fault == "hangs" else []


def evolve_faulty_pole(path, fault: str, monkeypatch) -> int:
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    base = [text for text in EVOLVE if not text.startswith(("env", "total"))]
    env = ["env=helpers.faulty_pole:FaultyPole", f"+env.fault={fault}"]
    words = ["evolve", *base, *env, "+env.after=90", *limit(fault)]
    return cli.main([*words, "--run-dir", str(path)])


def test_evolution_ends_in_one_line_and_keeps_its_checkpoint(
    tmp_path, capsys, monkeypatch
):
    path = tmp_path / "run"
    assert evolve_faulty_pole(path, "hangs", monkeypatch) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "a step of FaultyPole took longer than 2 seconds" in line
    assert f"kept {path / 'checkpoints'}" in line
    assert "env_timeout" in line


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("raises", "RuntimeError: no such state ("),
        ("runs_out", "EnvExitError: StopIteration ("),
    ],
)
def test_evolution_in_an_env_that_raises_ends_in_one_line(
    tmp_path, capsys, monkeypatch, fault, error
):
    path = tmp_path / "run"
    assert evolve_faulty_pole(path, fault, monkeypatch) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    assert error in line
    assert "faulty_pole.py:" in line
    assert ", raised by a step of FaultyPole" in line
    assert f"kept {path / 'checkpoints'}" in line
    assert "faulty_pole.py" in (path / "error.txt").read_text()


def test_evolution_refuses_rewards_that_would_broadcast(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run"
    assert evolve_faulty_pole(path, "wrong_shape", monkeypatch) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"kept {path / 'checkpoints'}" in line
    assert (
        "FaultyPole: rewards of 'agent': expected a tensor of float32 of shape (8, 1)"
        in line
    )
    assert "got float32 of shape (8, 1, 1)" in line


def clone_of_a_faulty_pole(path, fault: str, monkeypatch) -> int:
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    base = [text for text in CLONE if not text.startswith(("env", "teacher"))]
    env = ["env=helpers.faulty_pole:FaultyPole", f"+env.fault={fault}"]
    teacher = "teacher=marl_pool.envs.cartpole.heuristic:CartPoleHeuristic"
    words = ["clone", *base, *env, "+env.after=3", teacher, *limit(fault)]
    return cli.main([*words, "--run-dir", str(path)])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "took longer than 2 seconds"),
        ("raises", ", raised by a step of FaultyPole"),
    ],
)
def test_cloning_ends_in_one_line(tmp_path, capsys, monkeypatch, fault, message):
    assert clone_of_a_faulty_pole(tmp_path / "run", fault, monkeypatch) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert message in errors.splitlines()[-1]


def run_stuck(verb: str, tmp_path, monkeypatch, *arguments: str) -> int:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    policy = "pretrained=cartpole_attention_neuron_reshuffled"
    env = ["env=helpers.faulty_pole:FaultyPole", "+env.fault=hangs"]
    return cli.main([verb, policy, *env, "env_timeout=1", "--out", "out", *arguments])


LATE_POLE = "a step of FaultyPole took longer than 1 seconds, the limit env_timeout"


def test_an_evaluation_ends_in_one_line(tmp_path, capsys, monkeypatch):
    assert run_stuck("evaluate", tmp_path, monkeypatch, "episodes=2", "threads=2") == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"marl-pool: {LATE_POLE}"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["diagnose", "render"])
def test_other_readers_of_policies_end_in_one_line(verb, tmp_path, capsys, monkeypatch):
    pytest.importorskip("cv2")
    assert run_stuck(verb, tmp_path, monkeypatch) == 1
    assert LATE_POLE in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("fault", ["hangs", "spins"])
def test_the_live_page_ends_in_one_line(fault, tmp_path, capsys, monkeypatch):
    client = pytest.importorskip("websockets.sync.client")
    closed = pytest.importorskip("websockets.exceptions").ConnectionClosed
    reasons = []

    def watch(url: str) -> None:
        origin = url.partition("/?")[0]
        live = url.replace("http", "ws").replace("/?", "/live?")
        with client.connect(live, origin=origin, proxy=None) as connection:
            with suppress(closed):
                for _ in connection:
                    pass
            reasons.append(connection.close_reason)

    def announce(server, *, browser: bool) -> None:
        threads.append(threading.Thread(target=watch, args=[server.url]))
        threads[0].start()

    threads: list[threading.Thread] = []
    monkeypatch.setattr("marl_pool.play.server.announce", announce)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    policy = "pretrained=cartpole_attention_neuron_reshuffled"
    env = ["env=helpers.faulty_pole:FaultyPole", f"+env.fault={fault}"]
    assert cli.main(["play", policy, *env, "env_timeout=1"]) == 1
    threads[0].join()
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"marl-pool: {LATE_POLE}"
    assert reasons == [LATE_POLE]


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_report_ends_in_one_line(evaluates, tmp_path, capsys, monkeypatch):
    pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    base = [text for text in EVOLVE if not text.startswith("env")]
    env = ["env=helpers.faulty_pole:FaultyPole", "+env.fault=hangs", "+env.after=9999"]
    assert cli.main(["evolve", *base, *env, "--run-dir", "run"]) == 0
    settings = ["episodes=2", "perturbations=[]"]
    plugin = ["--plugin", "helpers.faulty_pole:FaultyPole"]
    if not evaluates:
        assert cli.main(["evaluate", "run", *settings, *plugin]) == 0
    monkeypatch.setattr(FaultyPole, "num_steps", 9999)
    words = ["evaluate=true", *settings] if evaluates else []
    assert cli.main(["report", "run", *words, *plugin, "env_timeout=1"]) == 1
    assert LATE_POLE in capsys.readouterr().err.splitlines()[-1]


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
