"""Training on a running cluster, and what is left when ray dies."""

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from helpers.ppo import run_of
from helpers.training import (
    PATIENCE,
    RAY_WARNINGS,
    run_python,
    start_python,
    wait_for_rows,
)
from marl_pool.config import compose
from marl_pool.runs.run import Run
from marl_pool.training.cluster import RAY_ADDRESS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster"), *RAY_WARNINGS]

TRAIN = ["-m", "marl_pool", "train"]
SMALL = [
    *("env.num_noise=2", "env.max_steps=8", "encoder.num_layers=1", "ppo.num_envs=4"),
    *("ppo.batch_size=32", "ppo.minibatch_size=32", "ppo.num_epochs=1"),
    *("checkpoint.every=1", "threads=1"),
]


AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
"""Variables of those that may join the cluster."""
OCCUPY = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
placed = ray.util.placement_group([{"CPU": 2}])
ray.get(placed.ready())
print("occupied", flush=True)
input()
"""
"""Program that holds the CPUs of the cluster until it is killed."""


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a cluster with two CPUs that requires a token."""
    # Socket paths must be short, and the machine's record of its last cluster is kept.
    folder = tempfile.mkdtemp(dir="/tmp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    options = [
        *("--block", "--num-cpus=2", "--include-dashboard=false"),
        *("--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"),
        f"--temp-dir={folder}",
    ]
    log = Path(folder) / "start.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, **AUTH},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + PATIENCE
        while "--block" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield address
    finally:
        # At SIGTERM, it would wait half a minute for its own processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def train(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    words = [*TRAIN, "--run-dir", path, *SMALL, *arguments]
    return run_python(*words, env={**os.environ, **AUTH, **variables})


def test_a_run_joins_the_cluster_of_its_environment(tmp_path, head):
    options = ("--num-env-runners=1", "total_steps=64")
    result = train(tmp_path / "run", *options, **{RAY_ADDRESS: head})
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    first = next(line for line in lines if "joined" in line)
    # Ray names the machine by another address than the loopback's.
    for part in (head.rpartition(":")[2], RAY_ADDRESS, "2 CPUs", "0 GPUs"):
        assert part in first
    assert any(" / 64 steps" in line for line in lines)
    assert "Traceback" not in result.stderr


def test_more_cpus_than_a_cluster_has_are_refused(tmp_path, head):
    options = ("--num-env-runners=3", "ppo.batch_size=48")
    result = train(tmp_path / "run", *options, f"--address={head}")
    assert result.returncode == 2
    assert "resources: expected at most 2 CPUs, got 3" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_cluster_without_a_free_cpu_is_not_waited_for_forever(tmp_path, head):
    variables = {**os.environ, **AUTH}
    with start_python(
        *("-c", OCCUPY, head), env=variables, stdin=subprocess.PIPE, stderr=None
    ) as occupying:
        assert occupying.stdout.readline() == "occupied\n"
        arguments = ("--num-env-runners=2", f"--address={head}", "time_limit=19")
        result = train(tmp_path / "run", *arguments)
        occupying.kill()
    assert result.returncode != 0
    assert re.search(r"processes that need 2 CPUs and 0 GPUs: \d+ s", result.stderr)
    assert "0 GPUs: not within 19 s" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_killed_raylet_ends_a_run_that_can_be_resumed(tmp_path):
    path = tmp_path / "run"
    endless = ("--num-env-runners=1", "total_steps=10_000_000")
    process = start_python(*TRAIN, "--run-dir", path, *SMALL, *endless)
    wait_for_rows(path, process, 3)
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [int(number) for file in threads for number in file.read_text().split()]
    (raylet,) = (
        number
        for number in children
        if Path(f"/proc/{number}/comm").read_text() == "raylet\n"
    )
    os.kill(raylet, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    # What Ray says itself depends on which of its threads notices first.
    assert f"lost ray; resume with: marl-pool resume {path}" in errors.splitlines()[-1]
    run = Run.open(path)
    assert run.damage_of(run.latest_checkpoint()) == ""


@pytest.mark.usefixtures("cluster")
def test_every_learner_has_rows_of_every_module(tmp_path):
    # One environment: the fox's only chunk went to one learner, and both waited.
    farm = ["env=helpers.farm:FoxAndHens", "ppo.num_envs=1", "total_steps=16"]
    base = [text for text in SMALL if not text.startswith(("env.", "ppo.num_envs"))]
    config = compose("train", [*base, *farm, "resources.num_learners=2"])
    rows = run_of(tmp_path / "run", config).rows()
    assert len(rows) == 2
    for row in rows:
        assert not math.isnan(row["fox/policy_loss"] + row["hen/policy_loss"])
