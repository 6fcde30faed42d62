"""The lives of agents by PettingZoo's rules, and environments that break them."""

import pytest
import torch

from helpers.rule_breaker import FAULTS
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.life import Lives
from marl_pool.utils.errors import InputError

MODULE = "helpers.rule_breaker:Breaker"
REFUSED = {
    "nobody after reset": "reset: env.agents: expected at least one agent, got none",
    "stranger": "reset: env.agents: expected one of possible_agents, got agent 'ghost'",
    "twice": "reset: env.agents: expected each agent once, got ('a_0', 'a_0')",
    "no list": "reset: env.agents: expected a list of names, got None",
    "a text": "reset: env.agents: expected a list of names, got 'a_0'",
    "no names": "reset: env.agents: expected names, got (['a_0'],)",
    "stranger later": "step 2: env.agents: expected one of possible_agents, got agent",
    "vanishes": "step 2: agent 'a_0': left env.agents without a flag, expected",
    "all vanish": "step 2: agent 'a_0': left env.agents without a flag, expected",
    "paid after the end": "step 3: agent 'a_0': reward: expected 0 of an agent that "
    "ended in step 2, whether env.agents lists it or not, got 1.0",
    "lives on": "step 3: agent 'a_0': ended in step 2 and is in env.agents without a "
    "flag, expected it to leave or to stay flagged",
    "__all__": "step 2: terminations: expected one of possible_agents, got agent "
    "'__all__'",
    "__all__ late": "step 2: truncations: expected one of possible_agents, got agent "
    "'__all__'",
    "no termination": "step 2: agent 'a_0': termination: expected one, got none",
    "no truncation": "step 2: agent 'a_0': truncation: expected one, got none",
    "flag None": "step 2: agent 'a_0': termination: expected True or False, got None",
    "flag number": "step 2: agent 'a_0': termination: expected True or False, got 0",
    "flag array": "step 2: agent 'a_0': truncation: expected True or False, got array",
    "flag ragged": "step 2: agent 'a_0': termination: expected True or False, got [[]",
    "reward with gradient": "step 2: agent 'a_0': reward: expected one number, got te",
    "flags list": "step 2: terminations: expected a dict, got a list",
    "flags bool": "step 2: truncations: expected a dict, got a bool",
    "no reward": "step 2: agent 'a_0': reward: expected one, got none",
    "reward None": "step 2: agent 'a_0': reward: expected one number, got None",
    "reward too large": "step 2: agent 'a_0': reward: expected one number, got 1000",
    "reward text": "step 2: agent 'a_0': reward: expected one number, got '1'",
    "reward array": "step 2: agent 'a_0': reward: expected one number, got array",
    "reward for a stranger": "step 2: rewards: expected one of possible_agents, got",
    "rewards number": "step 2: rewards: expected a dict, got a float",
    "no observation": "step 2: agent 'a_0': observation: expected one, got none",
    "no last observation": "step 5: agent 'a_0': observation: expected one, got none",
    "no first observation": "reset: agent 'a_0': observation: expected one, got none",
    "observation shape": "step 2: agent 'a_0': expected an observation of shape (2,)",
    "observation None": "step 2: agent 'a_0': expected an observation of shape (2,)",
    "observations array": "step 2: observations: expected a dict, got a ndarray",
    "infos None": "step 2: infos: expected a dict, got None",
    "infos list": "step 2: infos: expected a dict, got a list",
    "info None": "step 2: agent 'a_0': info: expected a dict, got None",
    "info text": "reset: agent 'a_1': info: expected a dict, got a str",
    "old reset": "reset: expected 2 dicts, observations, infos, got a dict",
    "reset None": "reset: expected 2 dicts, observations, infos, got a str",
    "reset of 3": "reset: expected 2 dicts, observations, infos, got 3 values",
    "old step": "step 2: expected 5 dicts, observations, rewards, terminations, "
    "truncations, infos, got 4 values",
    "step None": "step 2: expected 5 dicts, observations, rewards, terminations, "
    "truncations, infos, got a str",
}
"""By fault, its error line after ``env.module``."""


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


@pytest.mark.parametrize("fault", REFUSED)
def test_an_env_that_breaks_a_rule_is_refused_with_step_agent_and_rule(fault):
    with pytest.raises(InputError) as caught:
        play(fault)
    line = str(caught.value)
    assert line.startswith(f"env.module: {REFUSED[fault]}")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("fault", "returns", "lengths", "end"),
    [
        (None, [5, 5, 5], [5, 5, 5], "truncated"),
        ("ended and listed", [2, 5, 5], [1, 5, 5], "truncated"),
        ("truncated and listed", [2, 4, 4], [1, 3, 3], "terminated"),
        ("all end and stay listed", [2, 2, 2], [1, 1, 1], "terminated"),
        ("flagged numpy", [5, 5, 5], [5, 5, 5], "truncated"),
        ("one number", [5, 5, 5], [5, 5, 5], "truncated"),
        ("common", [5, 5, 5], [5, 5, 5], "truncated"),
        ("no infos", [5, 5, 5], [5, 5, 5], "truncated"),
        ("info for others", [5, 5, 5], [5, 5, 5], "truncated"),
        ("large reward", [4 + 1e30, 5, 5], [5, 5, 5], "truncated"),
    ],
)
def test_lax_envs_have_the_documented_meaning(fault, returns, lengths, end):
    rewards, active, ended = play(fault)
    totals = [sum(column) for column in zip(*rewards, strict=True)]
    assert totals == pytest.approx(returns)
    assert [sum(column) for column in zip(*active, strict=True)] == lengths
    assert ended == end


def test_each_fault_is_in_a_table():
    lax = {"ended and listed", "truncated and listed", "all end and stay listed"}
    lax |= {"flagged numpy", "one number", "common", "no infos", "info for others"}
    lax |= {"large reward"}
    assert FAULTS.keys() == REFUSED.keys() | lax


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
