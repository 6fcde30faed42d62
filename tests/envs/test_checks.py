"""Checks of a user's environment before training."""

import re

import pytest
import torch

from helpers.faulty_pole import FaultyPole
from helpers.tables import yaml_cases
from marl_pool.cli import main as cli
from marl_pool.envs.checks import RULES, check_env
from marl_pool.utils.errors import InputError

PLUG_IN = "helpers.faulty_pole:FaultyPole"

STEPS_RULE = "rewards and ends have their shapes and dtypes, and are finite"


@pytest.mark.parametrize(
    ("name", "options"),
    [("simple_tag", {"prey": "learned"}), ("cartpole", {"noise_channels": 1})],
)
def test_environments_of_the_package_keep_the_contract(name, options):
    assert check_env(name, **options) == dict.fromkeys(RULES, "")


@yaml_cases("fault, rule, expected")
def test_a_fault_is_found_and_named(monkeypatch, fault, rule, expected):
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    problems = check_env(PLUG_IN, fault=fault, after=10)
    (problem,) = (text for name, text in problems.items() if name.startswith(rule))
    assert expected in problem


class Careless(FaultyPole):
    """A pole that depends on the batch and writes into returned observations."""

    last = torch.zeros(1)

    def advance(self, actions):
        result = super().advance(actions)
        self.last.zero_()
        return result[0], result[1] | (self.num_envs == 1)

    def observe(self):
        tokens = super().observe()
        self.last = tokens["agent"].features
        return tokens


class CarelessState(FaultyPole):
    """A pole that writes into the state that it has returned."""

    shown = torch.zeros(1)

    def advance(self, actions):
        self.shown.zero_()
        return super().advance(actions)

    def observe_state(self):
        tokens = super().observe_state()
        self.shown = tokens["agent"].features
        return tokens


def test_a_state_that_later_steps_change_is_found():
    problems = check_env(f"{__name__}:CarelessState", fault="none")
    problem = problems.pop("later steps change neither an observation nor a state")
    assert problem.startswith("a state before and after later steps: expected equal")
    assert not any(problems.values())


def test_dependence_on_the_batch_and_on_later_steps_is_found():
    problems = check_env(f"{__name__}:Careless", fault="none")
    assert any("alone: expected equal" in problem for problem in problems.values())
    assert problems["later steps change neither an observation nor a state"]
    assert not problems["a seed determines the episodes"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (None, ""),
        ("lives on", "env.module: step 3: agent 'a_0': ended in step 2 and is in"),
        ("old reset", "env.module: reset: expected 2 dicts, observations, infos, got"),
        ("raises", r"expected .*got RuntimeError: the door is shut \(.*_breaker.py:"),
    ],
)
def test_a_pettingzoo_env_that_breaks_a_rule_is_named(fault, message):
    options = {"module": "helpers.rule_breaker:Breaker", "options": {"fault": fault}}
    problems = check_env("pettingzoo", **options)
    assert re.match(message, problems["a seed determines the episodes"])
    assert any(problems.values()) == (fault is not None)


def test_a_simulator_of_ours_may_not_always_start_in_one_place(monkeypatch):
    def constant(keys):
        return [3] * len(keys)

    monkeypatch.setattr("marl_pool.envs.simulation.reset_seeds", constant)
    problems = check_env("car_racing", max_steps=20)
    rule = "a seed determines the episodes"
    assert "expected different starts, got equal ones" in problems[rule]


def test_an_env_of_another_library_may_always_start_in_one_place():
    problems = check_env("pettingzoo", module="gymnasium:FrozenLake-v1")
    assert problems == dict.fromkeys(RULES, "")


def test_the_command_prints_a_line_for_each_rule(capsys):
    words = ["check-env", f"env={PLUG_IN}", "+env.after=1"]
    assert cli.main([*words, "+env.fault=wrong_shape"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RULES)
    (problem,) = (line for line in lines if "(3, 1, 1)" in line)
    assert problem.startswith(f"failed  {STEPS_RULE}: ")
    assert "of shape (3, 1), got float32 of shape (3, 1, 1)" in problem
    assert cli.main(["check-env", "ppo.lr=1"]) == 2
    message = capsys.readouterr().err
    for part in ("env=NAME", "env.KEY=…", "env_timeout=SECONDS", "got 'ppo.lr=1'"):
        assert part in message


class Loose(FaultyPole):
    """A pole whose ``**common`` has no type, so that only Python knows its options."""

    def __init__(self, num_envs: int, *, gain: float = 1.0, **common):
        super().__init__(num_envs, fault="none", **common)
        self.gain = gain


def test_an_option_that_a_loose_constructor_may_not_have_is_named(capsys):
    loose = f"env={__name__}:Loose"
    for verb in ("check-env", "train"):
        for key in ("num_envs", "seed"):
            assert cli.main([verb, loose, f"env.{key}=4"]) == 2
            message = capsys.readouterr().err
            assert f"env.{key}: unknown key {key!r}: choose from gain." in message
    # A key that its base refuses is found when it is constructed.
    with pytest.raises(InputError, match=r"env\.gian: .* choose from gain\. Did you"):
        check_env(f"{__name__}:Loose", gian=3)
    with pytest.raises(InputError, match=r"env\.seed: expected none, .*, got 3"):
        check_env("cartpole", seed=3)


class Seedless(FaultyPole):
    """A pole that passes no option on."""

    def __init__(self, num_envs: int, *, max_steps: int = 20):
        super().__init__(num_envs, fault="none", max_steps=max_steps)


def test_a_constructor_without_the_common_options_is_named(capsys):
    for verb in ("check-env", "train"):
        assert cli.main([verb, f"env={__name__}:Seedless"]) == 2
        message = capsys.readouterr().err
        assert "expected a constructor that accepts seed, " in message
        assert "**common passed on to BatchedEnv; got num_envs, max_steps" in message


def test_an_environment_that_hangs_is_named(monkeypatch, capsys):
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    words = ["check-env", f"env={PLUG_IN}", "+env.fault=hangs", "+env.after=5"]
    assert cli.main([*words, "env_timeout=0.2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RULES)
    assert lines[0] == "ok      groups are declared"
    assert "of FaultyPole took longer than 0.2 seconds" in lines[1]
    assert "the limit env_timeout" in lines[1]
    assert all(line.endswith(": likewise") for line in lines[2:])
