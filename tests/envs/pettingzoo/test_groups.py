"""Groups of agents that are made from their names."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from helpers.rule_breaker import Breaker
from helpers.turn_based import PassItOn
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.utils.errors import InputError


class Named(Breaker):
    """Agents of given names, each with as many numbers to see as ``sizes`` says."""

    def __init__(self, sizes: list[tuple[Any, int]]) -> None:
        super().__init__()
        self.possible_agents = [name for name, _ in sizes]
        self.sizes = dict(sizes)

    def observation_space(self, agent):
        if not self.sizes[agent]:
            raise KeyError("no such\nbeast")
        return spaces.Box(-9, 9, (self.sizes[agent],), np.float32)


class Bare(ParallelEnv):
    """An env that lists no agents."""


def groups(*sizes: tuple[Any, int]) -> dict[str, list[Any]]:
    """Return the agents of each group."""
    env = PettingZooEnv(1, module=f"{__name__}:Named", options={"sizes": list(sizes)})
    return {name: [*team.agents] for name, team in env._teams.items()}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # One name and several spaces, beside agents of the names that they would take.
        (
            [("a_0", 2), ("a_1", 3), ("a_b", 2)],
            {"a_a": ["a_0"], "a_c": ["a_1"], "a_b": ["a_b"]},
        ),
        (
            [("a_0", 2), ("a_1", 3), ("a_a", 2), ("a_b", 2)],
            {"a_c": ["a_0"], "a_d": ["a_1"], "a_a": ["a_a"], "a_b": ["a_b"]},
        ),
        # Numbers are "agent", unless others are called so.
        ([(0, 2), (1, 2)], {"agent": [0, 1]}),
        ([("0", 2), ("agent_0", 2)], {"agent_a": ["0"], "agent": ["agent_0"]}),
        (
            [("0", 2), ("1", 3), ("agent_0", 2), ("agent_1", 3)],
            {
                "agent_a": ["0"],
                "agent_b": ["1"],
                "agent_c": ["agent_0"],
                "agent_d": ["agent_1"],
            },
        ),
        # Names that cannot name a file.
        ([("red team/1", 2), ("..", 2)], {"red_team": ["red team/1"], "agent": [".."]}),
        ([("x/_0", 2), ("x_0", 2)], {"x_a": ["x/_0"], "x": ["x_0"]}),
        ([("ü:y_0", 2), ("a.b_0", 2)], {"ü_y": ["ü:y_0"], "a.b": ["a.b_0"]}),
        ([("a_0", 2), ("a0", 2), ("a", 2)], {"a": ["a_0", "a0", "a"]}),
    ],
)
def test_no_group_loses_an_agent_or_meets_another_s_name(sizes, expected):
    assert groups(*sizes) == expected


def test_there_are_more_groups_of_a_name_than_letters():
    names = [*groups(*((f"u_{i}", i + 1) for i in range(30)))]
    assert (names[25:27], len(set(names))) == (["u_z", "u_aa"], 30)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (AttributeError(), "expected an env with possible_agents, a list .*, got None"),
        (KeyError("x"), r"possible_agents: KeyError: 'x' \(.*test_groups.py:\d+\)$"),
        ([], r"a list of names, got \[\]$"),
        ({"a"}, "a list of names, got {'a'}$"),
        ("ab", "a list of names, got 'ab'$"),
        ([["a"], ["b"]], r"possible_agents: expected names, got \[\['a'\], \['b'\]\]$"),
    ],
)
@pytest.mark.parametrize("turn_based", [False, True])
def test_an_env_lists_the_names_of_its_agents(monkeypatch, value, message, turn_based):
    def names(env):
        if isinstance(value, Exception):
            raise value
        return value

    cls = PassItOn if turn_based else Bare
    monkeypatch.setattr(cls, "possible_agents", property(names), raising=False)
    module = "helpers.turn_based:PassItOn" if turn_based else f"{__name__}:Bare"
    with pytest.raises(InputError, match=f"^env.module: .*{message}"):
        PettingZooEnv(1, module=module)


@pytest.mark.parametrize("names", [["a", "a"], ["1", 1]])
def test_agents_of_one_name_are_refused(names):
    with pytest.raises(InputError, match="possible_agents of different names, got"):
        groups(*((name, 2) for name in names))


def test_a_space_that_raises_is_named_with_its_line():
    with pytest.raises(InputError) as caught:
        groups(("a", 2), ("b", 0))
    line = str(caught.value)
    assert line.startswith("env.module: the spaces of agent 'b': KeyError: 'no such")
    assert "test_groups.py:" in line
    assert "\n" not in line
