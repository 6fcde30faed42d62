"""Every tensor is made where its env or policy lives.

CI has no GPU, so the default device is one on which nothing can be computed: a tensor
that a step makes without a word about its device lands there, and the first operation
that meets it fails.
"""

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.env_cases import CASES
from helpers.samples import heads
from marl_pool.envs import HEURISTICS, make_batched_env, make_heuristic
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.training.ppo.trajectories import estimate_advantages

STEPS = 12
CPU = {"device": "cpu"}
NUM_ENVS = 3


def act(group: AgentGroup, generator: torch.Generator) -> Tensor:
    space, shape = group.action_space, (NUM_ENVS, group.num_agents)
    if isinstance(space, spaces.Discrete):
        return torch.randint(int(space.n), shape, generator=generator, **CPU)
    return torch.rand(*shape, *space.shape, generator=generator, **CPU)


def on_cpu(*tensors: Tensor) -> bool:
    return {tensor.device.type for tensor in tensors} == {"cpu"}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_envs_pass_a_device_to_every_tensor(name, options):
    generator = torch.Generator(**CPU).manual_seed(0)
    with torch.device("meta"):
        env = make_batched_env(name, NUM_ENVS, **CPU, **{**options, "max_steps": 5})
        env.reset()
        for _ in range(STEPS):
            groups = env.groups
            step = env.step({k: act(g, generator) for k, g in groups.items()})
            assert on_cpu(step.terminated, step.truncated, *step.rewards.values())
            ended = step.terminated | step.truncated
            if ended.any():
                env.reset(ended)
            for tokens in env.observe().values():
                assert on_cpu(*tokens.parts)
            assert on_cpu(*env.active.values())
        state = env.state_dict()
        env.select(torch.tensor([2, 0], **CPU)).observe()
        env.load_state_dict(state)
        env.observe()


@pytest.mark.parametrize("env_name", list(HEURISTICS))
def test_heuristics_pass_a_device_to_every_tensor(env_name):
    env = make_batched_env(env_name, NUM_ENVS, max_steps=5)
    policies = {
        name: make_heuristic(env_name, group, role=name)
        for name, group in env.groups.items()
    }
    with torch.device("meta"):
        Rollout(env, policies).steps(STEPS)


def centroid() -> BatchedEnv:
    return make_batched_env("simple_centroid", NUM_ENVS, num_noise=3, max_steps=5)


@heads
def test_policies_pass_a_device_to_every_tensor(name, options):
    env = make_batched_env("simple_centroid", NUM_ENVS, num_noise=1, max_steps=5, **CPU)
    group = env.groups["agent"]
    policy = make_policy(
        group.tokens, group.action_space, pooling={"name": name, **options}
    )
    with torch.device("meta"):
        rollout = Rollout(env, {"agent": policy}, explore=True)
        part = rollout.steps(STEPS)["agent"]
        assert on_cpu(*estimate_advantages(part, 0.9, 0.9))
        policy.attention_weights(part.tokens.at(0))
        rollout.load_state_dict(rollout.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"name": "bias"},
        {"name": "confuse"},
        {"name": "delay", "severity": [0.0, 1.0]},
        {"name": "duplicate", "severity": [0.0, 1.0]},
        {"name": "freeze", "every": 2},
        {"name": "inject", "count": 2, "token_type": "noise", "place": "far"},
        {"name": "jitter", "features": [0]},
        {"name": "occlude", "among": "signal", "ramp": 2},
        {"name": "rewire", "every": 3},
        {"name": "scale"},
        {"name": "shuffle", "held": 3},
    ],
    ids=lambda options: options["name"],
)
def test_perturbations_pass_a_device_to_every_tensor(options):
    env = centroid()
    group = env.groups["agent"]
    perturbation = make_perturbation(specs={"agent": group.tokens}, **options)
    with torch.device("meta"):
        policies = {"agent": RandomPolicy(group.action_space)}
        Rollout(env, policies, perturbation=perturbation).steps(STEPS)
