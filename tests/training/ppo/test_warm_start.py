"""Training runs that start from a saved policy's weights."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")

from helpers.farm import FoxAndHens, policies_of
from helpers.ppo import assert_same_weights, resumed, run_of
from helpers.tables import yaml_cases
from helpers.training import RAY_WARNINGS
from marl_pool.config import compose
from marl_pool.kernels.functional import strip_prefix
from marl_pool.policies import make_agent
from marl_pool.policies.storage import load_policy, save_policies, save_policy
from marl_pool.runs.run import Run
from marl_pool.training.ppo.algorithm import load_algorithm, save_algorithm
from marl_pool.training.ppo.runner import BatchedEnvRunner
from marl_pool.training.ppo.train import PPOMethod
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError

pytestmark = RAY_WARNINGS
FARM = "helpers.farm:FoxAndHens"
SMALL = [
    *(f"env={FARM}", "encoder.num_layers=1", "ppo.num_envs=4", "ppo.batch_size=48"),
    *("ppo.minibatch_size=12", "ppo.num_epochs=2", "total_steps=36"),
    *("checkpoint.every=1", "threads=1"),
]


def saved(folder: Path, *names: str, **options) -> dict:
    """Save policies that fit the run for some groups; return them."""
    options = {"pooling": {"name": "ada", "num_heads": 8}, "seed": 11, **options}
    policies = policies_of(FoxAndHens(1), **options)
    policies = {name: policies[name] for name in names}
    save_policies(policies, {name: name for name in names}, folder)
    return policies


def method_of(path: Path, *overrides: str) -> PPOMethod:
    config = compose("train", [*SMALL, *overrides])
    return PPOMethod(Run.create(path, config), TrainConfig.from_plain(config), None)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("critic=set",),
        ("ppo.value_norm=true",),
        pytest.param(
            ("resources.num_env_runners=1", "resources.num_learners=1"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["here", "team", "value_norm", "processes"],
)
def test_learners_and_runners_begin_with_the_saved_weights(tmp_path, overrides):
    policies = saved(tmp_path / "saved", "fox", "hen")
    method = method_of(tmp_path / "run", f"init={tmp_path / 'saved'}", *overrides)
    with method.session():
        weights = [method.algo.learner_group.get_weights()]
        group = method.algo.env_runner_group
        states = group.foreach_env_runner(lambda runner: runner.get_state())
        weights += [state["rl_module"] for state in states]
    assert len(weights) > 1
    for modules in weights:
        for name, policy in policies.items():
            parts = {key: torch.as_tensor(part) for key, part in modules[name].items()}
            for key, part in strip_prefix("policy", parts).items():
                assert torch.equal(part, policy.state_dict()[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_slow_runner_begins_with_the_saved_weights(tmp_path, is_resumed):
    class SlowRunner(BatchedEnvRunner):
        def set_state(self, state):
            time.sleep(1)
            super().set_state(state)

    policies = saved(tmp_path / "saved", "fox", "hen")
    init, runner = f"init={tmp_path / 'saved'}", "resources.num_env_runners=1"
    method = method_of(tmp_path / "run", init, runner)
    if is_resumed:
        with method.session():
            save_algorithm(method.algo, tmp_path / "checkpoint")
        method = method_of(tmp_path / "resumed", runner)
    method.algorithm.env_runners(env_runner_cls=SlowRunner)
    with method.session():
        if is_resumed:
            load_algorithm(method.algo, tmp_path / "checkpoint")
        group = method.algo.env_runner_group
        (state,) = group.foreach_env_runner(
            lambda runner: runner.get_state(), local_env_runner=False
        )
    parts = strip_prefix("policy", state["rl_module"]["hen"])
    for key, part in policies["hen"].state_dict().items():
        assert np.array_equal(parts[key], part), key


def test_a_shared_module_begins_with_the_only_policy(tmp_path):
    env = "env=helpers.farm:AlikeFoxAndHens"
    policies = saved(tmp_path / "saved", "hen")
    words = (env, "modules={fox: both, hen: both}", f"init={tmp_path / 'saved'}")
    method = method_of(tmp_path / "run", *words)
    expected = policies["hen"].state_dict()
    assert method.initial_weights.keys() == {"both"}
    for key, part in method.initial_weights["both"].items():
        assert torch.equal(part, expected[key])


def test_a_run_is_started_by_another_and_resumes_without_it(tmp_path):
    source = run_of(tmp_path / "source", compose("train", SMALL))
    config = compose("train", [*SMALL, f"init={source.path}", "seed=3"])
    reference = run_of(tmp_path / "whole", config)
    half = run_of(tmp_path / "half", {**config, "total_steps": 12})
    shutil.rmtree(source.path)
    paths = (run.policy_path("last") for run in (resumed(half.path, 36), reference))
    assert_same_weights(*paths)
    # What is sampled is what is learned from.
    assert reference.rows()[0]["hen/first_ratio_error"] < 1e-4


def test_a_pretrained_policy_is_trained_on(tmp_path):
    words = ["experiment=simple_centroid", "threads=1", "ppo.lr=3e-4"]
    config = compose("train", [*words, "init=pretrained=simple_centroid"])
    run = run_of(tmp_path / "run", {**config, "total_steps": 12_288})
    assert run.rows()[-1]["return_mean"] > -0.5  # random actions have -1.9


def test_a_policy_is_trained_on_with_another_number_of_tokens(tmp_path):
    words = ["experiment=simple_spread", "env.num_agents=5", "ppo.lr=3e-4"]
    config = compose("train", [*words, "init=pretrained=simple_spread", "threads=1"])
    run = run_of(tmp_path / "run", {**config, "total_steps": 4096})
    assert load_policy(run.policy_path("last")).spec.num_tokens == 10
    assert run.rows()[-1]["return_mean"] > -80  # random actions have -175


@yaml_cases("overrides, message")
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, overrides, message):
    saved(tmp_path / "both", "fox", "hen")
    saved(tmp_path / "hen", "hen")
    group = FoxAndHens(1).groups["hen"]
    agent = make_agent(group.tokens, group.action_space, "feed_forward", hidden=[4])
    save_policy(agent, tmp_path / "agent")
    words = overrides.replace("SAVED", str(tmp_path)).split()
    with pytest.raises(InputError, match=message) as caught:
        method_of(tmp_path / "run", *words)
    assert "\n" not in str(caught.value)
