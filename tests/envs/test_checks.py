"""Checks of a user's environment before training."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from helpers.farm import FoxAndHens
from helpers.faulty_pole import FaultyPole
from marl_pool.cli import main as cli
from marl_pool.envs.checks import RULES, check_env

PLUG_IN = "helpers.faulty_pole:FaultyPole"


@pytest.mark.parametrize(
    ("name", "options"),
    [("simple_tag", {"prey": "learned"}), ("cartpole", {"noise_channels": 1})],
)
def test_environments_of_the_package_keep_the_contract(name, options):
    assert check_env(name, **options) == dict.fromkeys(RULES, "")


@pytest.mark.parametrize(
    ("fault", "rule", "expected"),
    [
        (
            "wrong_shape",
            "rewards and ends",
            "of shape (3, 1), got float32 of shape (3, 1, 1)",
        ),
        ("NaN_reward", "rewards and ends", "expected finite numbers, got NaN"),
        ("NaN_observation", "observations", "expected finite numbers, got NaN"),
        ("raises", "a seed", "expected no error, got RuntimeError: no such state"),
    ],
)
@pytest.mark.parametrize("after", [1, 10])
def test_a_fault_is_found_and_named(monkeypatch, fault, rule, expected, after):
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    problems = check_env(PLUG_IN, fault=fault, after=after)
    (problem,) = (text for name, text in problems.items() if name.startswith(rule))
    assert expected in problem


class Careless(FaultyPole):
    """A pole that depends on the batch, and writes into what it has shown."""

    last = torch.zeros(1)

    def advance(self, actions):
        result = super().advance(actions)
        self.last.zero_()
        return result[0], result[1] | (self.num_envs == 1)

    def observe(self):
        tokens = super().observe()
        self.last = tokens["agent"].features
        return tokens


def test_dependence_on_the_batch_and_on_later_steps_is_found():
    problems = check_env(f"{__name__}:Careless", fault="none")
    assert any("alone: expected equal" in problem for problem in problems.values())
    assert problems["later steps do not change an observation"]
    assert not problems["a seed determines the episodes"]


class Misshapen(FaultyPole):
    """A pole one of whose parts of an observation is changed."""

    change = staticmethod(lambda tokens: tokens)

    def observe(self):
        return {"agent": self.change(super().observe()["agent"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {"types": t.types + 9},
            "types of 'agent': expected numbers below 1",
        ),
        (
            lambda t: {"types": t.types - 1},
            "types of 'agent': expected numbers below 1",
        ),
        (
            lambda t: {"types": t.types.int()},
            "types of 'agent': expected a tensor of int64",
        ),
        (
            lambda t: {"types": t.types[..., :1]},
            "types of 'agent': expected a tensor of int64 of shape (3, 1, 5)",
        ),
        (
            lambda t: {"padding": t.padding.long()},
            "padding of 'agent': expected a tensor of bool",
        ),
        (
            lambda t: {"padding": t.padding[0]},
            "padding of 'agent': expected a tensor of bool of shape (3, 1, 5)",
        ),
        (
            lambda t: {"features": t.features.double()},
            "agent: features: expected torch.float32, got torch.float64",
        ),
        (
            lambda t: {"features": t.features[:1]},
            "features of 'agent': expected a tensor of float32 of shape (3, 1, ",
        ),
    ],
)
def test_each_part_of_an_observation_is_held_to_its_spec(monkeypatch, change, message):
    def changed(tokens):
        return tokens._replace(**change(tokens))

    monkeypatch.setattr(Misshapen, "change", staticmethod(changed))
    problems = check_env(f"{__name__}:Misshapen", fault="none")
    assert message in problems[next(rule for rule in RULES if "observations" in rule)]


class Miscounting(FaultyPole):
    """A pole one of whose properties or results of a step is changed."""

    changes: ClassVar[dict[str, Any]] = {}

    @property
    def active(self):
        change = self.changes.get("active", lambda active: active)
        return {"agent": change(super().active["agent"])}

    def step(self, actions):
        step = super().step(actions)
        parts = {name: c for name, c in self.changes.items() if name != "active"}
        return step._replace(**{n: c(getattr(step, n)) for n, c in parts.items()})


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        (
            {"rewards": lambda r: {"agent": r["agent"].double()}},
            "rewards",
            "agent: dtype of rewards: expected torch.float32, got torch.float64",
        ),
        (
            {"rewards": lambda r: {}},
            "rewards",
            "rewards: expected the groups agent, got none",
        ),
        (
            {"terminated": Tensor.long},
            "rewards",
            "terminated: expected a tensor of bool of shape (3,), got int64",
        ),
        (
            {"truncated": Tensor.long},
            "rewards",
            "truncated: expected a tensor of bool of shape (3,), got int64",
        ),
        (
            {"truncated": lambda t: t[:, None]},
            "rewards",
            "of shape (3,), got bool of shape (3, 1)",
        ),
        ({"truncated": torch.zeros_like}, "rewards", "truncated after max_steps: exp"),
        (
            {"active": Tensor.float},
            "some",
            "active of 'agent': expected a tensor of bool of shape (3, 1), got float",
        ),
        (
            {"active": lambda a: a[0]},
            "some",
            "bool of shape (3, 1), got bool of shape (1,)",
        ),
        (
            {"active": torch.zeros_like},
            "some",
            "alive: expected at least one agent while the episode runs, got none",
        ),
    ],
)
def test_steps_and_lives_are_held_to_their_rules(monkeypatch, changes, rule, message):
    monkeypatch.setattr(Miscounting, "changes", changes)
    problems = check_env(f"{__name__}:Miscounting", fault="none")
    name = next(name for name in RULES if name.startswith(rule))
    assert message in problems[name]


class Haunted(FoxAndHens):
    """The last hen is absent, and earns all the same."""

    @property
    def active(self):
        active = super().active
        active["hen"][:, 2] = False
        return active


def test_agents_that_are_not_active_earn_nothing():
    problems = check_env(f"{__name__}:Haunted")
    faults = {name: problem for name, problem in problems.items() if problem}
    ((rule, problem),) = faults.items()
    assert rule.startswith("some agents are alive")
    assert problem.startswith(
        "Haunted: rewards: expected 0 for an agent that is not alive, got "
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lives on", "env.module: step 3: agent 'a_0': ended in step 2 and is in"),
        ("old reset", "env.module: reset: expected 2 dicts, observations, infos, got"),
        ("raises", "expected no error, got RuntimeError: the door is shut ("),
    ],
)
def test_a_pettingzoo_env_that_breaks_a_rule_is_named(fault, message):
    options = {"module": "helpers.rule_breaker:Breaker", "options": {"fault": fault}}
    problems = check_env("pettingzoo", **options)
    assert problems["a seed determines the episodes"].startswith(message)
    if fault == "raises":
        assert "rule_breaker.py:" in problems["a seed determines the episodes"]


def test_a_pettingzoo_env_that_keeps_the_rules_passes():
    options = {"module": "helpers.rule_breaker:Breaker", "options": {"fault": None}}
    assert check_env("pettingzoo", **options) == dict.fromkeys(RULES, "")


def test_the_command_prints_a_line_for_each_rule(capsys):
    words = ["check-env", f"env={PLUG_IN}", "+env.after=1"]
    assert cli.main([*words, "+env.fault=wrong_shape"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RULES)
    assert any(
        "of shape (3, 1), got float32 of shape (3, 1, 1)" in line for line in lines
    )
    assert cli.main(["check-env", "ppo.lr=1"]) == 2
    message = capsys.readouterr().err
    for part in ("env=NAME", "env.KEY=…", "env_timeout=SECONDS", "got 'ppo.lr=1'"):
        assert part in message


def test_an_environment_that_hangs_is_named(monkeypatch, capsys):
    monkeypatch.setattr(FaultyPole, "num_steps", 0)
    words = ["check-env", f"env={PLUG_IN}", "+env.fault=hangs", "+env.after=5"]
    assert cli.main([*words, "env_timeout=0.2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RULES)
    assert lines[0] == "ok      groups are declared"
    assert "of FaultyPole took longer than 0.2 seconds" in lines[1]
    assert "the limit env_timeout" in lines[1]
    first = "the same as of 'observations have the declared shapes, dtypes and types'"
    assert all(line.endswith(first) for line in lines[2:])
