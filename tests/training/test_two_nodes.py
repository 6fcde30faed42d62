"""Trainings on a Ray cluster of two nodes, one of which may die."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from helpers.training import PATIENCE, wait_for_rows
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import read_table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]

SMALL = [
    *("env.counts=1-2-2", "env.max_steps=8", "encoder.num_layers=1", "ppo.num_envs=4"),
    *("ppo.batch_size=64", "ppo.minibatch_size=64", "ppo.num_epochs=1"),
    "checkpoint.every=2",
]


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    node = cluster.head_node if line == "head\\n" else nodes.pop()
    cluster.remove_node(node, allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""
"""A head that computes nothing, and two nodes; a line on stdin kills one of them, and
the line ``head`` the head."""
COMMAND = """
import sys
from marl_pool.cli.main import main
from marl_pool.training.ppo import algorithm

algorithm.RESTART_SECONDS = 2.0
sys.exit(main())
"""
"""The command line, with a short wait for nodes that return."""
ENV = {
    **os.environ,
    # Ray reads its token when it is imported.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0" * 64,
    # A dead node is noticed within seconds.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}


class Nodes:
    """A cluster in a separate process.

    Args:
        folder: working folder of the commands that join it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env=ENV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.process.stdout.readline().strip()

    def kill_one(self, name: str = "") -> None:
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "removed\n"

    def start(self, *words: str, **variables: str) -> subprocess.Popen:
        """Start a command that joins the cluster."""
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, "--address", self.address],
            cwd=self.folder,
            env={**ENV, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


def test_two_runners_and_two_learners(nodes, tmp_path):
    process = nodes.start(
        *("train", "--run-dir", "run", *SMALL, "total_steps=256"),
        *("--num-env-runners=2", "--num-learners=2"),
    )
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    run = Run.open(tmp_path / "run")
    assert run.rows()[-1]["env_steps"] >= 256
    assert not run.damage_of(run.latest_checkpoint())


def test_a_sweep_of_four_trials_and_its_storage(nodes, tmp_path):
    store = f"file://{tmp_path}/store"
    words = ("sweep", "--sweep-dir", "study", "--storage", store, *SMALL)
    job = (*words, "total_steps=128", "seed=0,1,2,3", "--or-resume")
    process = nodes.start(*job)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    table = read_table(tmp_path / "study")
    assert {row["status"] for row in table} == {"finished"}
    # Without the folder, the storage has all of it: for the same command again,
    (tmp_path / "study").rename(tmp_path / "gone")
    again = nodes.start(*job)
    _, errors = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, errors
    assert read_table(tmp_path / "study") == table
    # and for another one.
    resumed = subprocess.run(
        [sys.executable, "-m", "marl_pool", "resume", f"{store}/study"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert read_table(tmp_path / "sweeps" / "study") == table


def test_a_training_goes_on_when_a_node_dies_and_ends_resumable_without_any(
    nodes, tmp_path
):
    words = ("train", "--run-dir", "run", *SMALL, "total_steps=1_000_000")
    process = nodes.start(*words, "--num-env-runners=2", "time_limit=600")
    wait_for_rows(tmp_path / "run", process, 3)
    before = len(Run.open(tmp_path / "run").rows())
    nodes.kill_one()
    wait_for_rows(tmp_path / "run", process, before + 20)
    nodes.kill_one()
    last_line, run = end_of(process), Run.open(tmp_path / "run")
    assert "the runners returned no steps" in last_line
    assert f"kept run/checkpoints/{run.latest_checkpoint().name}" in last_line
    assert not run.damage_of(run.latest_checkpoint())


def end_of(process: subprocess.Popen) -> str:
    """Wait for a training that fails, and return the last line of what it says."""
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_a_trial_goes_on_elsewhere_when_its_node_dies(nodes, tmp_path):
    words = ("sweep", "--sweep-dir", "study", *SMALL, "seed=0,1", "total_steps=9600")
    process = nodes.start(*words, "--cpus-per-trial=2")  # one on each node
    for seed in range(2):
        wait_for_rows(tmp_path / "study" / "trials" / f"seed={seed}", process, 3)
    nodes.kill_one()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    table = read_table(tmp_path / "study")
    assert {row["status"] for row in table} == {"finished"}
    for seed in range(2):
        steps = [row["env_steps"] for row in table if row["seed"] == seed]
        assert steps == sorted({*steps})
        assert steps[-1] >= 9600


def test_a_training_whose_head_dies_ends_resumable(nodes, tmp_path):
    words = ("train", "--run-dir", "run", *SMALL, "total_steps=1_000_000")
    process = nodes.start(*words, "--num-env-runners=2", "time_limit=600")
    wait_for_rows(tmp_path / "run", process, 3)
    nodes.kill_one("head")
    assert "resume with: marl-pool resume run" in end_of(process)
    run = Run.open(tmp_path / "run")
    assert not run.damage_of(run.latest_checkpoint())


HERD = """
import length
from marl_pool.envs.particles.simple_centroid import SimpleCentroid


class Herd(SimpleCentroid):
    def __init__(self, num_envs, **options):
        super().__init__(num_envs, max_steps=length.STEPS, **options)
"""


def test_plug_ins_reach_nodes_that_lack_them(nodes, tmp_path):
    package = tmp_path / "plug_ins" / "herd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HERD)
    (package.parent / "length.py").write_text("STEPS = 8\n")
    small = [override for override in SMALL if not override.startswith("env.")]
    process = nodes.start(
        *("train", "--run-dir", "run", *small, "env=herd:Herd"),
        *("total_steps=64", "--num-env-runners=2"),
        # A folder that the working folder of the nodes does not have.
        PYTHONPATH=os.pathsep.join(["plug_ins", ENV["PYTHONPATH"]]),
    )
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert Run.open(tmp_path / "run").rows()[-1]["env_steps"] >= 64
