"""Training on a Ray cluster of two nodes, one of which may die."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from helpers.training import PATIENCE, run_python, start_python, wait_for_rows
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

    Attributes:
        folder: working folder of the commands that join it.
        intact: False once a node was killed.
    """

    def __init__(self) -> None:
        self.folder, self.intact = Path(), True
        pipes = {"stdin": subprocess.PIPE, "stderr": None}
        self.process = start_python("-c", CLUSTER, env=ENV, **pipes)
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the cluster did not start"

    def kill_one(self, name: str = "") -> None:
        self.intact = False
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "removed\n"

    def start(self, *words: str, **variables: str) -> subprocess.Popen:
        """Start a command that joins the cluster."""
        command = ("-c", COMMAND, *words, "--address", self.address)
        return start_python(*command, cwd=self.folder, env={**ENV, **variables})

    def finish(self, *words: str, **variables: str) -> None:
        """Run a command that joins the cluster and succeeds."""
        process = self.start(*words, **variables)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def intact_clusters() -> Iterator[list[Nodes]]:
    """The cluster that a later test can use, if there is one."""
    clusters: list[Nodes] = []
    yield clusters
    for nodes in clusters:
        nodes.process.communicate(timeout=PATIENCE)


@pytest.fixture
def nodes(intact_clusters, tmp_path) -> Iterator[Nodes]:
    nodes = intact_clusters.pop() if intact_clusters else Nodes()
    nodes.folder = tmp_path
    yield nodes
    if nodes.intact:
        intact_clusters.append(nodes)
    else:
        nodes.process.communicate(timeout=PATIENCE)


HERD = """
import length
from marl_pool.envs.particles.simple_centroid import SimpleCentroid


class Herd(SimpleCentroid):
    def __init__(self, num_envs, **options):
        super().__init__(num_envs, max_steps=length.STEPS, **options)
"""


def test_two_runners_and_two_learners_on_nodes_that_lack_the_plug_in(nodes, tmp_path):
    package = tmp_path / "plug_ins" / "herd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HERD)
    (package.parent / "length.py").write_text("STEPS = 8\n")
    small = [override for override in SMALL if not override.startswith("env.")]
    nodes.finish(
        *("train", "--run-dir", "run", *small, "env=herd:Herd", "total_steps=256"),
        *("--num-env-runners=2", "--num-learners=2"),
        # A folder that is missing from the nodes' working folder.
        PYTHONPATH=os.pathsep.join(["plug_ins", ENV["PYTHONPATH"]]),
    )
    run = Run.open(tmp_path / "run")
    assert run.rows()[-1]["env_steps"] >= 256
    assert not run.damage_of(run.latest_checkpoint())


def test_a_sweep_of_four_trials_and_its_storage(nodes, tmp_path):
    store = f"file://{tmp_path}/store"
    words = ("sweep", "--sweep-dir", "study", "--storage", store, *SMALL)
    job = (*words, "total_steps=128", "seed=0,1,2,3", "--or-resume")
    nodes.finish(*job)
    table = read_table(tmp_path / "study")
    assert {row["status"] for row in table} == {"finished"}
    # Without the folder, the storage suffices for the same command
    (tmp_path / "study").rename(tmp_path / "gone")
    nodes.finish(*job)
    assert read_table(tmp_path / "study") == table
    # and for `resume`.
    resumed = run_python("-m", "marl_pool", "resume", f"{store}/study", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert read_table(tmp_path / "sweeps" / "study") == table


def test_training_survives_the_death_of_one_node_but_not_of_both(nodes, tmp_path):
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
    """Wait for a training run to fail; return the last line that it prints."""
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_a_trial_continues_on_the_other_node_when_its_own_dies(nodes, tmp_path):
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


def test_a_training_run_whose_head_dies_can_be_resumed(nodes, tmp_path):
    words = ("train", "--run-dir", "run", *SMALL, "total_steps=1_000_000")
    process = nodes.start(*words, "--num-env-runners=2", "time_limit=600")
    wait_for_rows(tmp_path / "run", process, 3)
    nodes.kill_one("head")
    assert "resume with: marl-pool resume run" in end_of(process)
    run = Run.open(tmp_path / "run")
    assert not run.damage_of(run.latest_checkpoint())
