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


def command(verb: str, *drop: str) -> list[str]:
    """Return a campaign's command without the keys of some prefixes."""
    base = {"evolve": EVOLVE, "clone": CLONE}[verb]
    return [verb, *(text for text in base if not text.startswith(("env", *drop)))]


@pytest.fixture
def last_line(tmp_path, monkeypatch, capsys):
    """Run a command in a faulty env, in an empty folder; return its one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FaultyPole, "num_steps", 0)

    def run(*words: str, fault: str = "hangs", limit: int | None = 1) -> str:
        env = ["env=helpers.faulty_pole:FaultyPole", f"+env.fault={fault}"]
        limits = [f"env_timeout={limit}"] if limit else []
        assert cli.main([*words, *env, *limits]) == 1
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        return errors.splitlines()[-1]

    return run


EVOLVED = [*command("evolve", "total"), "+env.after=90", "--run-dir", "run"]


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("hangs", ["a step of FaultyPole took longer than 2 seconds", "env_timeout"]),
        ("raises", ["RuntimeError: no such state (", "faulty_pole.py:"]),
        ("raises", [", raised by a step of FaultyPole"]),
        ("runs_out", ["EnvExitError: StopIteration (", "faulty_pole.py:"]),
        (
            # It would broadcast.
            "wrong_shape",
            ["rewards of 'agent': expected a tensor of float32 of shape (8, 1)"],
        ),
        ("wrong_shape", ["FaultyPole: ", "got float32 of shape (8, 1, 1)"]),
    ],
)
def test_evolution_ends_in_one_line_and_keeps_its_checkpoint(
    tmp_path, last_line, fault, parts
):
    line = last_line(*EVOLVED, fault=fault, limit=2 if fault == "hangs" else None)
    assert [part for part in parts if part not in line] == []
    assert "kept run/checkpoints" in line
    if fault in ("raises", "runs_out"):
        assert "faulty_pole.py" in (tmp_path / "run" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hangs", "took longer than 2 seconds"),
        ("raises", ", raised by a step of FaultyPole"),
    ],
)
def test_cloning_ends_in_one_line(last_line, fault, message):
    teacher = "teacher=marl_pool.envs.cartpole.heuristic:CartPoleHeuristic"
    words = [*command("clone", "teacher"), "+env.after=3", teacher]
    limit = 2 if fault == "hangs" else None
    assert message in last_line(*words, "--run-dir", "run", fault=fault, limit=limit)


LATE_POLE = "a step of FaultyPole took longer than 1 seconds, the limit env_timeout"
POLICY = "pretrained=cartpole_attention_neuron_reshuffled"


def test_an_evaluation_ends_in_one_line(tmp_path, last_line):
    words = ["evaluate", POLICY, "--out", "out", "episodes=2", "threads=2"]
    assert last_line(*words) == f"marl-pool: {LATE_POLE}"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["diagnose", "render"])
def test_other_readers_of_policies_end_in_one_line(verb, last_line):
    pytest.importorskip("cv2")
    assert LATE_POLE in last_line(verb, POLICY, "--out", "out")


@pytest.mark.parametrize("fault", ["hangs", "spins"])
def test_the_live_page_ends_in_one_line(fault, last_line, monkeypatch):
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
    line = last_line("play", POLICY, fault=fault)
    threads[0].join()
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
    command = [sys.executable, "-c", HANGS]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    assert "marl-pool: run: a reset of int took longer than 0.2" in ended.stderr
