"""The XOR game: rewards by brute force, and the returns of invariant policies."""

import itertools
import math

import pytest
import torch

from marl_pool import Rollout, make_batched_env, make_heuristic
from marl_pool.envs.xor.env import XOR
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling import pooling_names
from marl_pool.utils.errors import InputError

SIZES = {"name": "transformer", "dim": 8, "num_layers": 1, "num_heads": 2, "dim_ff": 8}
ORDERED = {"flatten", "lstm", "learned_aggregation", "attention_neuron"}
"""Heads that depend on token order, or have memory."""


@pytest.mark.parametrize("num_agents", [2, 3])
def test_exactly_one_has_to_choose_1(num_agents: int) -> None:
    rows = list(itertools.product((0, 1), repeat=num_agents))
    env = XOR(len(rows), num_agents=num_agents)
    env.reset()
    step = env.step({"agent": torch.tensor(rows)})
    expected = [[float(sum(row) == 1)] * num_agents for row in rows]
    assert step.rewards["agent"].tolist() == expected
    assert not step.terminated.any()


@pytest.mark.parametrize(
    ("tie_breaker", "numbers"), [("none", [0, 0, 0]), ("rank", [0, 0.5, 1])]
)
def test_an_agent_sees_itself_first(tie_breaker: str, numbers: list[float]) -> None:
    env = XOR(1, num_agents=3, tie_breaker=tie_breaker)  # type: ignore[arg-type]
    env.reset()
    tokens = env.observe()["agent"]
    a, b, c = numbers
    assert tokens.features[0, :, :, 0].tolist() == [[a, b, c], [b, a, c], [c, a, b]]
    assert tokens.types[0].tolist() == [[0, 1, 1]] * 3


def test_random_numbers_differ_from_step_to_step_and_agree_between_agents() -> None:
    env = XOR(5, num_agents=3, tie_breaker="random")
    env.reset()
    before = env.numbers.clone()
    env.step({"agent": torch.zeros(5, 3, dtype=torch.int64)})
    assert (env.numbers != before).all()
    numbers = env.observe()["agent"].features[..., 0].sort(-1).values
    assert torch.equal(numbers[:, 0], numbers[:, 1])
    assert torch.equal(numbers[:, 0], numbers[:, 2])


def mean_reward(env: XOR, policy: torch.nn.Module, explore: bool = False) -> float:
    rollout = Rollout(env, {"agent": policy}, explore=explore)
    return float(rollout.episodes().returns["agent"].mean()) / env.max_steps


@pytest.mark.parametrize("num_agents", [2, 5])
@pytest.mark.parametrize("tie_breaker", ["rank", "random"])
def test_heuristic_with_a_tie_breaker_solves_xor(
    tie_breaker: str, num_agents: int
) -> None:
    env = make_batched_env(
        "xor", num_envs=64, num_agents=num_agents, tie_breaker=tie_breaker
    )
    assert mean_reward(env, make_heuristic("xor", env.groups["agent"])) == 1


@pytest.mark.parametrize("head", sorted({*pooling_names()} - ORDERED))
def test_shared_deterministic_policy_without_tie_breaker_earns_0(head: str) -> None:
    env = XOR(8, num_agents=2)
    group = env.groups["agent"]
    try:
        policy = TokenPolicy(
            group.tokens,
            group.action_space,
            encoder=SIZES,
            pooling={"name": head},
            seed=0,
        )
    except InputError:
        pytest.skip("the head needs options")
    assert mean_reward(env, policy.eval()) == 0


def test_random_policy_earns_the_analytic_mean() -> None:
    for num_agents in (2, 4):
        env = XOR(4000, num_agents=num_agents, max_steps=4)
        policy = RandomPolicy(env.groups["agent"].action_space)
        probability = num_agents * 0.5**num_agents
        error = math.sqrt(probability * (1 - probability) / 16000)
        assert mean_reward(env, policy) == pytest.approx(probability, abs=4 * error)


def test_a_single_agent_is_refused() -> None:
    with pytest.raises(InputError, match="env.num_agents: expected at least 2, got 1"):
        XOR(1, num_agents=1)
