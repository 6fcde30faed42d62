"""PPO as a user runs it: whole algorithms, small."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray")

from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, LEARNER_RESULTS, WEIGHTS_SEQ_NO

from helpers.ppo import (
    assert_same,
    local_learner,
    resumed,
    rllib_config,
    run_of,
    weights_of,
)
from helpers.tables import yaml_cases
from helpers.training import RAY_WARNINGS
from marl_pool.config import compose
from marl_pool.encoders import encoder_names
from marl_pool.policies.base import Policy
from marl_pool.policies.storage import load_policy
from marl_pool.pooling import pooling_names
from marl_pool.runs.run import Run
from marl_pool.training.jobs import config_of
from marl_pool.training.ppo import train
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.batch import episode_rows, prepare_rows
from marl_pool.training.ppo.learner import FIRST_KL, FIRST_RATIO_ERROR
from marl_pool.training.ppo.runner import ROLLOUT
from marl_pool.training.ppo.train import PPOMethod
from marl_pool.training.settings import PPOSettings, ResourceSettings, TrainConfig
from marl_pool.utils.errors import InputError, StoppedError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), *RAY_WARNINGS]

UNSCALED = PPOSettings(normalize_value_loss=False)
SMALL = [
    *("env.num_noise=4", "env.max_steps=8", "encoder.num_layers=1", "ppo.num_envs=8"),
    *("ppo.batch_size=64", "ppo.minibatch_size=32", "ppo.num_epochs=2"),
    *("total_steps=256", "checkpoint.every=2", "threads=1"),
]
TOY = [
    *("env=helpers.farm:FoxAndHens", "ppo.num_envs=4", "ppo.batch_size=128"),
    *("ppo.minibatch_size=24", "ppo.num_epochs=3", "total_steps=64"),
    *("encoder.num_layers=1", "threads=1", "checkpoint.every=1"),
]
SPREAD = ["env=pettingzoo", "env.module=mpe2.simple_spread_v3", "ppo=fast_spread"]


def plain_config(*overrides: str) -> dict:
    return compose("train", [*SMALL, *overrides])


def trained(path: Path, *overrides: str, base: list[str] = SMALL) -> Run:
    return run_of(path, compose("train", [*base, *overrides]))


@pytest.mark.parametrize(
    ("group", "name"),
    [
        *(("pooling", name) for name in pooling_names()),
        *(("encoder", name) for name in encoder_names()),
    ],
)
def test_every_head_and_encoder_trains_and_its_policy_loads(tmp_path, group, name):
    # Not every encoder has layers.
    base = [text for text in SMALL if group == "pooling" or "num_layers" not in text]
    words = (f"{group}={name}", "total_steps=128")
    run = trained(tmp_path / "run", *words, base=base)
    rows = run.rows()
    assert [row["iteration"] for row in rows] == [1, 2]
    assert rows[-1]["env_steps"] == 128
    assert rows[-1]["episodes"] == 16
    assert all(math.isfinite(value) for value in rows[-1].values())
    # Only rounding differs: sampling and learning have different batch sizes.
    limit = 5e-5 if group == "pooling" else 1e-5
    assert rows[0]["agent/first_ratio_error"] < limit
    assert rows[0]["agent/first_kl"] < 1e-6
    assert load_policy(run.policy_dir).config[group]["name"] == name


def test_overflowing_probabilities_are_reported_once(tmp_path, capsys):
    extreme = ("pooling=max", "policy.init_std=1000", "total_steps=128")
    trained(tmp_path / "run", *extreme)
    message = capsys.readouterr().err
    assert message.count("first_kl of module 'agent' is") == 1
    assert "policy.init_std" in message


def test_without_dropout_the_first_ratio_is_one_and_with_it_is_not(build):
    for option, low, high in (
        ("dropout=0", 0.0, 1e-5),
        ("dropout=0.1", 1e-4, math.inf),
        ("token_dropout=0.3", 1e-4, math.inf),
    ):
        algo = build(plain_config(f"ppo.{option}"))
        metrics = algo.train()[LEARNER_RESULTS]["agent"]
        assert low <= metrics[FIRST_RATIO_ERROR] < high
        assert (metrics[FIRST_KL] > 1e-6) == (low > 0)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_sampler_has_dropout_only_if_it_is_asked_for(build, kernels):
    for in_sampler in (False, True):
        options = ("ppo.dropout=0.3", "ppo.token_dropout=0.3", f"kernels={kernels}")
        option = f"ppo.dropout_in_sampler={in_sampler}"
        runner = build(plain_config(*options, option)).env_runner
        runner.sample()
        (policy,) = runner.rollout.policies.values()
        (tokens,) = runner.rollout.tokens.values()
        with torch.no_grad():
            first, second = (policy.act(tokens).logits for _ in range(2))
        assert first.equal(second) != in_sampler


def test_recorded_values_are_what_the_learner_would_compute(build):
    algo = build(plain_config())
    runner, learner = algo.env_runner, local_learner(algo)
    episodes = runner.sample()
    rows = prepare_rows(episode_rows(episodes)["agent"], UNSCALED)
    with torch.no_grad():
        values = learner.module["agent"].compute_values(rows)

    def recorded(key: str) -> torch.Tensor:
        parts = [episode.extra_model_outputs[key].data for episode in episodes]
        return torch.cat([torch.as_tensor(part) for part in parts])

    expected = recorded(Columns.VF_PREDS)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    # Value targets reach the batch unstandardised.
    targets = rows[Postprocessing.VALUE_TARGETS]
    torch.testing.assert_close(targets, recorded(Postprocessing.VALUE_TARGETS))


def test_learners_with_microbatches_keep_equal_weights(build):
    """2048 steps in two pieces each: complete gradients are averaged once."""
    sizes = ["ppo.num_envs=64", "ppo.batch_size=4096", "ppo.minibatch_size=null"]
    algo = build(plain_config("resources.num_learners=2", *sizes))

    def weights(learner):
        module = learner.module["agent"].unwrapped()
        return [part.detach().numpy().copy() for part in module.parameters()]

    def all_weights():
        return [result.get() for result in algo.learner_group.foreach_learner(weights)]

    before, _ = all_weights()
    algo.train()
    first, second = all_weights()
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert any((a != b).any() for a, b in zip(before, first, strict=True))


@pytest.mark.parametrize("estimate", ["last", "mean"])
def test_learners_keep_equal_kl_coefficients(build, estimate):
    penalty = ["ppo.kl_coeff=0.2", "ppo.kl_target=0.01", f"ppo.kl_estimate={estimate}"]
    algo = build(plain_config("resources.num_learners=2", "ppo.lr=3e-3", *penalty))

    def coefficient(learner):
        return float(learner.curr_kl_coeffs_per_module["agent"])

    logged = []
    for _ in range(6):
        metrics = algo.train()[LEARNER_RESULTS]["agent"]
        answers = algo.learner_group.foreach_learner(coefficient)
        first, second = (answer.get() for answer in answers)
        logged.append(metrics["curr_kl_coeff"])
        assert first == second == pytest.approx(logged[-1])
    assert len(set(logged)) > 1


@pytest.mark.parametrize(("size", "steps"), [("null", 1), ("32", 2), ("20", 4)])
def test_a_minibatch_counts_agent_steps(build, size, steps):
    algo = build(plain_config("env.num_agents=4", f"ppo.minibatch_size={size}"))
    learner, counts = local_learner(algo), []
    update = learner._update

    def count(batch):
        counts.append(len(batch["agent"][Columns.ACTIONS]))
        return update(batch)

    learner._update = count
    result = algo.train()
    assert len(counts) == 2 * steps
    assert sum(counts) == 2 * 64
    # Several agents share one module.
    assert result[ENV_RUNNER_RESULTS]["num_env_steps_sampled"] == 16
    assert result[LEARNER_RESULTS]["agent"]["num_module_steps_trained"] == 2 * 64


def test_runners_that_give_no_steps_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(BatchedPPO, "train", lambda self: {})
    with pytest.raises(StoppedError, match="returned no steps in 3"):
        trained(tmp_path / "run")
    assert Run.open(tmp_path / "run").rows() == []


def test_a_time_limit_shorter_than_the_start_of_processes_allows_an_iteration(tmp_path):
    words = ("resources.num_env_runners=1", "time_limit=0.1", "checkpoint.every=1")
    assert [row["iteration"] for row in trained(tmp_path / "run", *words).rows()] == [1]


def test_gpus_that_are_not_there_are_refused(tmp_path, monkeypatch):
    learners = ["resources.num_learners=2", "resources.num_gpus_per_learner=1"]
    with pytest.raises(InputError, match="resources: expected at most 0 GPUs, got 2"):
        trained(tmp_path / "learners", *learners)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for override, key in (
        ("device=cuda:7", "device"),
        ("resources.num_gpus_per_learner=1", "resources.num_gpus_per_learner"),
    ):
        message = f"^{key}: expected cpu, since torch finds no CUDA device, got cuda"
        with pytest.raises(InputError, match=message):
            trained(tmp_path / key, override)


def test_what_a_resumed_run_refuses_leaves_its_configuration_alone(tmp_path):
    run = trained(tmp_path / "run", "total_steps=64")
    resources = ResourceSettings(num_env_runners=3)
    with pytest.raises(InputError, match=r"ppo.batch_size: expected a multiple"):
        train(run, replace(config_of(run), resources=resources))
    assert Run.open(tmp_path / "run").config["resources"]["num_env_runners"] == 0


def test_another_seed_changes_a_run(tmp_path):
    first, reseeded = (
        weights_of(trained(tmp_path / seed, seed, "total_steps=64").policy_dir)
        for seed in ("seed=1", f"seed={2**62}")
    )
    assert not all(torch.equal(first[name], reseeded[name]) for name in first)


@pytest.mark.parametrize("in_sampler", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, in_sampler):
    random = (
        f"ppo.dropout_in_sampler={in_sampler}",
        *("ppo.dropout=0.1", "ppo.kl_coeff=0.5", "perturbation=duplicate"),
        *("perturbation.severity=[0,0.6]", "perturbation.ramp=5"),
    )
    reference = trained(tmp_path / "whole", *random)
    half = trained(tmp_path / "half", "total_steps=128", *random)
    run = resumed(half.path, 256)
    assert Run.open(half.path).config["total_steps"] == 256
    assert_same(run, reference)
    for checkpoint in (reference.latest_checkpoint(), run.latest_checkpoint()):
        assert checkpoint.name == "iter_000004"


def test_a_linear_learning_rate_falls_to_zero_at_the_last_step(tmp_path):
    run = trained(tmp_path / "run", "ppo.lr=1e-2", "ppo.lr_schedule=linear")
    # Logged after each of the four updates: the rate of the next one.
    rates = [row["agent/learning_rate"] for row in run.rows()]
    assert rates == pytest.approx([7.5e-3, 5e-3, 2.5e-3, 0.0])
    constant = trained(tmp_path / "constant", "ppo.lr=1e-2", "total_steps=128")
    assert {row["agent/learning_rate"] for row in constant.rows()} == {1e-2}


def test_a_run_stopped_on_a_linear_learning_rate_resumes_bit_for_bit(tmp_path):
    linear = plain_config("ppo.lr_schedule=linear")
    reference = run_of(tmp_path / "whole", linear)
    half = Run.create(tmp_path / "half", linear)
    stop = iter([False, False, True])
    train(half, config_of(half), lambda: next(stop))
    half.close()
    assert half.last_saved_iteration == 2
    assert_same(resumed(half.path, linear["total_steps"]), reference)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_resumed_run_follows_its_present_learning_rate_at_once(tmp_path, schedule):
    run = trained(tmp_path / "run", f"ppo.lr_schedule={schedule}", "total_steps=128")
    config = config_of(run)
    ppo = replace(config.ppo, lr=2 * config.ppo.lr)
    method = PPOMethod(run, replace(config, ppo=ppo, total_steps=256), None)
    with method.session():
        method.restore(run.latest_checkpoint())
        (optimizer,) = local_learner(method.algo)._named_optimizers.values()
        # Half of the doubled rate is left at half of the steps.
        rate = ppo.lr if schedule == "constant" else config.ppo.lr
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize(("edited", "expected"), [(0.2, 0.1), (50.0, 50.0)])
def test_an_edited_kl_coefficient_is_used_on_resume(tmp_path, edited, expected):
    # A divergence far below the target halves the coefficient.
    run = trained(
        tmp_path / "run",
        *("ppo.kl_coeff=0.2", "ppo.kl_target=9", "total_steps=64"),
    )
    config = config_of(run)
    ppo = replace(config.ppo, kl_coeff=edited)
    method = PPOMethod(run, replace(config, ppo=ppo), None)
    with method.session():
        method.restore(run.latest_checkpoint())
        learner = local_learner(method.algo)
        coefficient = float(learner.curr_kl_coeffs_per_module["agent"])
    assert coefficient == pytest.approx(expected)


@pytest.mark.parametrize(
    "override", ["ppo.num_envs=16", "env.num_noise=10", "perturbation=occlude"]
)
def test_edits_that_change_the_episodes_start_them_anew(tmp_path, capsys, override):
    run = trained(tmp_path / "run", "total_steps=64")
    train(run, TrainConfig.from_plain(plain_config(override, "total_steps=128")))
    run.close()
    key = override.split("=")[0].replace("env.num_noise", "env")
    assert f"{key} changed: all episodes start anew" in capsys.readouterr().err
    assert [row["env_steps"] for row in run.rows()] == [64, 128]


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    run = trained(tmp_path / "run", "checkpoint.every=3", "total_steps=192")
    # As if the process had died in iteration 4, after its row and before a checkpoint.
    with run.metrics_path.open() as lines:
        rows = list(csv.reader(lines))
    with run.metrics_path.open("a") as out:
        csv.writer(out).writerow(["4", *rows[-1][1:]])
    run.config["total_steps"] = 256
    train(run, config_of(run))
    run.close()
    assert [row["iteration"] for row in run.rows()] == [1, 2, 3, 4]
    assert run.rows()[-1]["env_steps"] == 256


@pytest.mark.parametrize("poison", ["observations", "rewards"])
def test_non_finite_data_stop_the_run_with_what_was_seen(tmp_path, poison):
    overrides = [f"env.poison={poison}", "env.poison_step=11", "env.end_chance=0.0"]
    message = rf"NaN or infinite: .*{poison}.* environment \d"
    with pytest.raises(StoppedError, match=message):
        trained(tmp_path / "run", *overrides, base=TOY)
    run = Run.open(tmp_path / "run")
    assert [path.name for path in run.checkpoints()] == ["iter_000001"]
    weights = weights_of(run.policy_dir)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_weights(tmp_path):
    with pytest.raises(StoppedError, match="loss or gradient of module 'agent'"):
        trained(tmp_path / "run", "ppo.value_coeff=1e38", "ppo.grad_clip=null")
    assert Run.open(tmp_path / "run").rows() == []


@yaml_cases("overrides, message")
def test_parts_that_do_not_fit_are_refused_before_anything_starts(overrides, message):
    with pytest.raises(InputError, match=message):
        rllib_config(plain_config(*overrides.split()))


@pytest.mark.parametrize(
    "overrides",
    [
        ["env=simple_centroid", "env.num_agents=4", "ppo=fast_centroid"],
        ["env=simple_tag", "env.num_predators=2", "ppo=fast_tag"],
        ["env=boxworld", "env.observation=pixels", "ppo=fast_boxworld"],
        *([*SPREAD, f"env.options.N={agents}"] for agents in (4, 5, 6)),
    ],
)
def test_presets_fit_their_environments(overrides):
    config = compose("train", overrides)
    assert rllib_config(config).lr == [[0, config["ppo"]["lr"]], [1_000_000, 0.0]]


def test_the_runner_obeys_rllibs_interface(build):
    algo = build(plain_config())
    runner = algo.env_runner
    assert sum(map(len, runner.sample(num_timesteps=10))) == 16
    runner.assert_healthy()

    weights = runner.get_state(components=[COMPONENT_RL_MODULE])
    assert ROLLOUT not in weights
    assert ROLLOUT in runner.get_state()
    without = runner.get_state(not_components=[COMPONENT_RL_MODULE])
    assert COMPONENT_RL_MODULE not in without
    before = runner.module["agent"].policy.value_head[0].weight.clone()
    agent = weights[COMPONENT_RL_MODULE]["agent"]
    zeros = {"agent": {name: 0 * weight for name, weight in agent.items()}}
    runner.num_updates = 5
    runner.set_state({COMPONENT_RL_MODULE: zeros, WEIGHTS_SEQ_NO: 4})
    assert torch.equal(runner.module["agent"].policy.value_head[0].weight, before)
    runner.set_state({COMPONENT_RL_MODULE: ray.put(zeros), WEIGHTS_SEQ_NO: 6})
    assert not runner.module["agent"].policy.value_head[0].weight.any()


def test_a_restarted_runner_continues_the_severity_ramp(build):
    """256 steps of 2 * 8 environments are two episodes of 8 steps each."""
    ramp = ["perturbation=occlude", "perturbation.severity=1", "perturbation.ramp=4"]
    config = rllib_config(plain_config(*ramp)).copy(copy_frozen=False)
    config.num_env_runners = 2
    for steps, missing in ((0, 0), (256, 4), (1 << 20, 7)):
        runner = config.env_runner_cls(config=config, worker_index=1, num_workers=2)
        runner.set_state({"num_env_steps_sampled_lifetime": steps})
        padding = runner.sample()[0].observations.data["padding"]
        assert (padding.sum(-1)[:8] == missing).all()


def test_remote_runners_and_learners(tmp_path):
    # All processes find a plug-in's head.
    head = "helpers.plug_in:SumPooling"
    run = trained(
        tmp_path / "run",
        *(f"pooling={head}", "resources.num_env_runners=2"),
        *("resources.num_learners=2", "ppo.lr_schedule=linear", "ppo.lr=1e-2"),
        *("perturbation=occlude", "perturbation.severity=[0,0.6]"),
        *("perturbation.ramp=2", "ppo.batch_size=128", "total_steps=256"),
    )
    rows = run.rows()
    assert rows[-1]["env_steps"] == 256
    rates = [row["agent/learning_rate"] for row in rows]
    assert rates == pytest.approx([5e-3, 0.0])
    # While the perturbation grows, returns of two checkpoints don't compare.
    assert run.best.iteration == rows[-1]["iteration"]
    assert rows[0]["agent/first_ratio_error"] < 1e-5
    with pytest.raises(InputError, match="allow it"):
        load_policy(run.policy_dir)
    assert isinstance(load_policy(run.policy_dir, plugins=[head]), Policy)
    document = json.loads((run.policy_dir / "config.json").read_text())
    assert document["groups"] == {"agent": "agent"}
