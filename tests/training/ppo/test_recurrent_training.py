"""PPO with recurrent policies: whole algorithms, small."""

import pytest
import torch

ray = pytest.importorskip("ray")

from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics import LEARNER_RESULTS

from helpers.ppo import assert_same, local_learner, resumed, run_of
from helpers.training import RAY_WARNINGS
from marl_pool.compiled.choice import use_kernels
from marl_pool.config import compose
from marl_pool.policies.storage import load_policies
from marl_pool.training.ppo import learner as learner_module
from marl_pool.training.ppo.batch import num_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), *RAY_WARNINGS]

SMALL = [
    *("env=helpers.farm:FoxAndHens", "encoder=identity", "pooling=attention_neuron"),
    *("pooling.num_codes=4", "ppo.num_envs=4", "ppo.batch_size=192"),
    *("ppo.minibatch_size=48", "ppo.max_seq_len=5", "ppo.num_epochs=2"),
    *("total_steps=192", "threads=1", "checkpoint.every=1"),
]


def config_of(*overrides: str) -> dict:
    return compose("train", [*SMALL, *overrides])


@pytest.mark.parametrize("memory", ["lstm", "none"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, memory):
    """Memories too: the checkpoint is saved in mid-episode."""
    extra = f"pooling.memory={memory}"
    reference = run_of(tmp_path / "whole", config_of(extra))
    half = run_of(tmp_path / "half", config_of(extra, "total_steps=96"))
    assert_same(resumed(half.path, 192), reference)


def test_remote_runners_and_learners_share_sequences(tmp_path):
    config = config_of(
        *("pooling.memory=lstm", "policy.trunk=separate"),
        *("resources.num_env_runners=1", "resources.num_learners=2"),
    )
    run = run_of(tmp_path / "run", config)
    for row in run.rows():
        for name in ("fox", "hen"):
            assert row[f"{name}/first_ratio_error"] < 1e-5
    assert all(policy.recurrent for policy in load_policies(run.policy_dir).values())


def test_every_step_is_passed_as_often_as_asked(build):
    algo = build(config_of())
    learner = local_learner(algo)
    steps: dict[str, list[int]] = {"fox": [], "hen": []}
    rows: dict[str, list[int]] = {"fox": [], "hen": []}
    update = learner._update

    def count(batch, **kwargs):
        for name, part in batch.items():
            steps[name].append(num_steps(part))
            rows[name].append(len(part[Columns.ACTIONS]))
        return update(batch, **kwargs)

    learner._update = count
    algo.train()
    # 192 agent steps are 12 steps of 4 environments: 48 of the fox, 144 of the hens.
    assert sum(steps["fox"]) == 2 * 48
    assert sum(steps["hen"]) == 2 * 144
    assert len(rows["fox"]) == len(rows["hen"]) == 2 * 3
    assert max(rows["hen"]) - min(rows["hen"]) <= 1


def test_pieces_add_up_to_the_gradient_of_the_whole_minibatch(build, monkeypatch):
    def gradients_and_losses(piece):
        monkeypatch.setattr(learner_module, "MICROBATCH_STEPS", piece)
        algo = build(config_of("ppo.minibatch_size=null", "ppo.num_epochs=1"))
        with use_kernels("torch"):
            metrics = algo.train()[LEARNER_RESULTS]
        losses = [
            torch.tensor(float(metrics[module][name]))
            for module in ("fox", "hen")
            for name in ("policy_loss", "vf_loss", "entropy")
        ]
        flats = local_learner(algo)._flat.values()
        return [*losses, *(flat.values.grad.clone() for flat in flats)]

    expected, summed = gradients_and_losses(1000), gradients_and_losses(7)
    torch.testing.assert_close(summed, expected, rtol=1e-3, atol=1e-5)
