"""The lives of agents by PettingZoo's rules, and environments that break them."""

from pathlib import Path

import pytest
import torch
import yaml

from helpers.rule_breaker import FAULTS
from helpers.tables import yaml_cases
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.life import Lives
from marl_pool.utils.errors import InputError

MODULE = "helpers.rule_breaker:Breaker"


def zeros(env: PettingZooEnv) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(env.num_envs, 3, dtype=torch.int64)}


def play(fault: str | None) -> tuple[list[list[float]], list[list[bool]], str]:
    """Return each step's rewards and agents that remain, and how the episode ended."""
    env = PettingZooEnv(1, module=MODULE, options={"fault": fault})
    env.reset()
    rewards, active = [], []
    while True:
        step = env.step(zeros(env))
        rewards.append(step.rewards["a"][0].tolist())
        active.append(env.active["a"][0].tolist())
        if step.terminated[0] or step.truncated[0]:
            return rewards, active, "truncated" if step.truncated[0] else "terminated"


@yaml_cases("fault, message")
def test_an_env_that_breaks_a_rule_is_refused_with_step_agent_and_rule(fault, message):
    with pytest.raises(InputError) as caught:
        play(fault)
    line = str(caught.value)
    assert line.startswith(f"env.module: {message}")
    assert "\n" not in line


LAX = {
    "ended and listed": ([2, 5, 5], [1, 5, 5], "truncated"),
    "truncated and listed": ([2, 4, 4], [1, 3, 3], "terminated"),
    "all end and stay listed": ([2, 2, 2], [1, 1, 1], "terminated"),
    "large reward": ([4 + 1e30, 5, 5], [5, 5, 5], "truncated"),
    **dict.fromkeys(
        ("flagged numpy", "one number", "common", "no infos", "info for others", None),
        ([5, 5, 5], [5, 5, 5], "truncated"),
    ),
}
"""Returns, lengths of lives and the end of the episode, by the env's fault."""


@pytest.mark.parametrize("fault", LAX)
def test_lax_envs_have_the_documented_meaning(fault):
    returns, lengths, end = LAX[fault]
    rewards, active, ended = play(fault)
    totals = [sum(column) for column in zip(*rewards, strict=True)]
    assert totals == pytest.approx(returns)
    assert [sum(column) for column in zip(*active, strict=True)] == lengths
    assert ended == end


def test_each_fault_is_in_a_table():
    text = Path(__file__).with_suffix(".yaml").read_text()
    ((_, refused),) = yaml.safe_load(text).items()
    assert {None, *FAULTS} == {fault for fault, _ in refused} | {*LAX}


def no_flags(*agents: str) -> dict[str, bool]:
    return dict.fromkeys(agents, False)


def test_agents_are_born_and_die_and_are_born_again():
    lives = Lives(["a", "b"])
    lives.begin(["a"])
    lives.advance(["b", "a"], no_flags("a"), no_flags("a"))
    assert (lives.acted, lives.alive) == (("a",), ("b", "a"))
    lives.advance(["b"], {"a": True, "b": False}, no_flags("a", "b"))
    assert (lives.acted, lives.alive) == (("b", "a"), ("b",))
    assert lives.earned({"a": 2, "b": 1.5}) == {"b": 1.5, "a": 2.0}
    lives.advance(["b", "a"], no_flags("b"), no_flags("b"))
    assert lives.alive == ("b", "a")
    assert lives.seen({"a": 1, "b": 2}) == {"b": 2, "a": 1}
    with pytest.raises(InputError, match="step 3: agent 'a': reward: .* did not act"):
        lives.earned({"a": 1.0, "b": 1.0})


def test_only_the_last_to_leave_are_bootstrapped():
    lives = Lives(["a", "b", "c"])
    lives.begin(["a", "b", "c"])
    lives.advance(["b", "c"], no_flags(*"abc"), {**no_flags(*"bc"), "a": True})
    assert (lives.alive, lives.timed_out) == (("b", "c"), ())
    lives.advance([], {"b": True, "c": False}, {"b": True, "c": True})
    assert (lives.alive, lives.timed_out) == ((), ("c",))
    assert lives.seen({"c": 4}) == {"c": 4}
