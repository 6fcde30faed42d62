"""Runs without remote runners and learners, which need no Ray processes."""

from contextlib import contextmanager

import pytest

ray = pytest.importorskip("ray")

from ray.rllib.algorithms.ppo import PPO

from helpers.ppo import assert_same, resumed, rllib_config, run_of
from helpers.training import RAY_WARNINGS
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.runs.run import Run
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.learner import LOCAL_DEVICE

pytestmark = [pytest.mark.usefixtures("no_cluster"), *RAY_WARNINGS]

SMALL = [
    *("env=helpers.farm:FoxAndHens", "encoder.num_layers=1", "ppo.num_envs=4"),
    *("ppo.batch_size=128", "ppo.minibatch_size=64", "ppo.num_epochs=1"),
    *("ppo.kl_coeff=0.2", "checkpoint.every=1", "threads=1"),
]
BATCH = 32
"""Environment steps of an iteration."""


def test_a_local_run_starts_no_ray(tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise AssertionError("ray was started")

    monkeypatch.setattr(ray, "init", fail)
    config = compose("train", [*SMALL, f"total_steps={BATCH}"])
    run_of(tmp_path / "run", config)
    run = resumed(tmp_path / "run", 2 * BATCH)
    assert [row["env_steps"] for row in run.rows()] == [BATCH, 2 * BATCH]
    assert "marl-pool:" not in capsys.readouterr().err
    flags = ["episodes=2", "perturbations=[]", "--plugin", "helpers.farm:FoxAndHens"]
    assert cli.main(["evaluate", str(run.path), *flags]) == 0, capsys.readouterr()
    assert not ray.is_initialized()


class Killed(BaseException):
    """A simulated SIGKILL."""


@pytest.mark.parametrize("count", [1, 2])
def test_a_kill_between_the_best_checkpoint_and_its_policy_loses_nothing(
    tmp_path, monkeypatch, capsys, count
):
    config = compose("train", [*SMALL, f"total_steps={2 * BATCH}"])
    reference = run_of(tmp_path / "whole", config)
    assert reference.best.iteration == 2  # of two modules the newest is the best
    save, saved = Run.save_policy_dir, []

    @contextmanager
    def killed(run, best=None):
        saved.append(best)
        if len(saved) == count:
            raise Killed
        with save(run, best) as folder:
            yield folder

    monkeypatch.setattr(Run, "save_policy_dir", killed)
    with pytest.raises(Killed):
        run_of(tmp_path / "killed", config)
    monkeypatch.undo()
    run = Run.open(tmp_path / "killed")
    assert run.last_saved_iteration == count
    assert run.best is None or run.best.iteration < count
    plugin = ("--plugin", "helpers.farm:FoxAndHens")
    assert cli.main(["resume", str(run.path), *plugin]) == 0
    run = Run.open(run.path)
    assert run.best == reference.best
    files = sorted(path.name for path in reference.policy_dir.iterdir())
    assert sorted(path.name for path in run.policy_dir.iterdir()) == files
    for name in files:
        file, expected = run.policy_dir / name, reference.policy_dir / name
        assert file.read_bytes() == expected.read_bytes(), name
    assert ("nothing to do" in capsys.readouterr().out) == (count == 2)


@pytest.mark.parametrize(
    ("overrides", "device", "gpus"),
    [
        ([], "cpu", 0),
        (["device=cuda"], "cuda", 0),
        (["device=cuda:1", "resources.num_gpus_per_learner=1"], "cuda:1", 0),
        (["resources.num_gpus_per_learner=1"], "cuda", 0),
        # Ray gives a GPU to a learner in a separate process.
        (["resources.num_learners=1", "resources.num_gpus_per_learner=1"], None, 1),
        (["resources.num_learners=2", "device=cuda"], None, 0),
    ],
)
def test_the_learner_is_on_the_device_of_the_environments(overrides, device, gpus):
    config = rllib_config(compose("train", [*SMALL, *overrides]))
    assert config.learner_config_dict[LOCAL_DEVICE] == device
    assert config.num_gpus_per_learner == gpus


@pytest.mark.slow
def test_a_local_run_is_that_of_rllibs_own_group_bit_for_bit(tmp_path, monkeypatch):
    config = compose("train", [*SMALL, f"total_steps={2 * BATCH}"])
    run_of(tmp_path / "run", config)
    run = resumed(tmp_path / "run", 4 * BATCH)
    assert not ray.is_initialized()
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    # The same with Ray beside it, and in RLlib's group, whose resume uses the store.
    run_of(tmp_path / "beside", config)
    assert_same(resumed(tmp_path / "beside", 4 * BATCH), run)
    monkeypatch.setattr(BatchedPPO, "setup", PPO.setup)
    run_of(tmp_path / "other", config)
    assert_same(resumed(tmp_path / "other", 4 * BATCH), run)
