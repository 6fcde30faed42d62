"""Tokenizers, held against the state inside mpe2's envs."""

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from helpers.paths import ROOT
from marl_pool.cli import arguments
from marl_pool.cli.main import main
from marl_pool.config import compose
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.tokenizers import FITTING, TOKENIZERS, fitting, make_tokenizer
from marl_pool.envs.tokenizers.base import Observer, Tokenizer
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

GUIDE = ROOT / "docs" / "tokenizers.md"
ZERO = (0.0, 0.0)
Token = tuple[str, list[float]]


def relative(origin: Any, entity: Any) -> tuple[float, float]:
    return tuple(entity.state.p_pos - origin.state.p_pos)


def kind(agent: Any) -> str:
    return "adversary" if getattr(agent, "adversary", False) else "agent"


# What each agent should see, from the entities themselves


def spread(agent: Any, env: Any) -> list[Token]:
    features = [*agent.state.p_pos, *agent.state.p_vel, *ZERO]
    tokens: list[Token] = [("self", features)]
    for mark in env.landmarks:
        tokens.append(("landmark", [*relative(agent, mark), *ZERO, *ZERO]))
    for neighbor in env.agents:
        if neighbor is not agent:
            heard = [*relative(agent, neighbor), *ZERO, *neighbor.state.c]
            tokens.append(("agent", heard))
    return tokens


def tag(agent: Any, env: Any) -> list[Token]:
    tokens: list[Token] = [("self", [*agent.state.p_pos, *agent.state.p_vel])]
    for mark in env.landmarks:
        tokens.append(("obstacle", [*relative(agent, mark), *ZERO]))
    for neighbor in env.agents:
        if neighbor is not agent:
            speed = ZERO if neighbor.adversary else neighbor.state.p_vel
            tokens.append((kind(neighbor), [*relative(agent, neighbor), *speed]))
    return tokens


@pytest.mark.parametrize(
    ("module", "options", "oracle"),
    [
        ("simple_spread_v3", {}, spread),
        ("simple_spread_v3", {"N": 5, "continuous_actions": True}, spread),
        ("simple_spread_v3", {"N": 1}, spread),
        ("simple_tag_v3", {}, tag),
        (
            "simple_tag_v3",
            {"num_good": 3, "num_adversaries": 2, "num_obstacles": 4},
            tag,
        ),
        ("simple_tag_v3", {"num_adversaries": 1, "num_obstacles": 0}, tag),
    ],
)
def test_tokens_are_the_entities(module, options, oracle):
    env = PettingZooEnv(3, module=f"mpe2.{module}", options=options, seed=1)
    env.reset()
    for step in range(4):
        actions = {}
        for name, group in env.groups.items():
            shape = (3, group.num_agents, *(group.action_space.shape or ()))
            moves = torch.arange(np.prod(shape)).view(shape) + step
            discrete = not group.action_space.shape
            actions[name] = moves % 5 if discrete else torch.sin(moves.float())
        env.step(actions)
    observations = env.observe()
    for row in range(3):
        inner = env._cursors[row].simulator.inner.env.unwrapped.world
        for agent in inner.agents:
            name, _, number = agent.name.rpartition("_")
            tokens = observations[name].at((row, int(number)))
            expected = oracle(agent, inner)
            names = env.groups[name].tokens.type_names
            assert [names[t] for t in tokens.types] == [t for t, _ in expected]
            features = [features for _, features in expected]
            np.testing.assert_allclose(tokens.features, features, atol=1e-6)
            assert not tokens.padding.any()
            assert env.groups[name].tokens.has_self


def test_slots_of_absent_entities_are_padding():
    options = {"N": 3, "num_agent_neighbors": 4, "num_landmark_neighbors": 2}
    env = PettingZooEnv(2, module="mpe2.simple_spread_v3", options=options)
    env.reset()
    tokens = env.observe()["agent"]
    assert tokens.types[0, 0].tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert tokens.padding[0, 0].tolist() == [False] * 5 + [True] * 2
    # The nearest first.
    distance = tokens.features[..., 1:3, :2].norm(dim=-1)
    assert (distance[..., 0] <= distance[..., 1]).all()
    tagged = PettingZooEnv(
        1, module="mpe2.simple_tag_v3", options={"num_landmark_neighbors": 3}
    )
    tagged.reset()
    assert tagged.observe()["agent"].padding[0, 0].tolist()[1:4] == [0, 0, 1]


def test_the_generic_tokenizer_gives_each_number_a_type():
    env = PettingZooEnv(2, module="mpe2.simple_tag_v3", tokenizer="features", seed=3)
    plain = PettingZooEnv(2, module="mpe2.simple_tag_v3", seed=3)
    for instance in (env, plain):
        instance.reset()
    tokens = env.observe()["agent"]
    spec = env.groups["agent"].tokens
    assert (spec.num_tokens, spec.num_features, spec.has_self) == (14, 1, False)
    assert spec.type_names[:2] == ("feature_0", "feature_1")
    assert tokens.types[1, 0].tolist() == list(range(14))
    # The observation begins with velocity, then position.
    features = plain.observe()["agent"].features[:, :, 0]
    assert tokens.features[..., :4, 0].equal(features[..., [2, 3, 0, 1]])


def test_a_module_finds_its_tokenizer():
    assert fitting("mpe2.simple_tag_v3") == "simple_tag"
    assert fitting("mpe2.simple_tag_v3:parallel_env") == "simple_tag"
    assert fitting("my.simple_tag_v3") == "features"
    assert set(FITTING.values()) == set(TOKENIZERS) - {"features"}


def observer(agents: str, size: int, group: str = "", **options: Any) -> Observer:
    names = tuple(agents.split())
    members = tuple(name for name in names if name.startswith(group))
    return Observer(group or "all", members, names, size, options)


TAGGED = "adversary_0 adversary_1 adversary_2 agent_0"


@pytest.mark.parametrize(
    ("name", "subject", "message"),
    [
        ("simple_spread", observer("agent_0 agent_1", 15), "reads 12 numbers in 4 tok"),
        ("simple_spread", observer("fox_0 agent_1", 14), "agents named agent_N or adv"),
        (
            "simple_tag",
            observer(TAGGED, 14, "adversary"),
            "simple_tag: reads 16 numbers in 6 tokens, but group 'adversary' obs.* 14",
        ),
        ("simple_tag", observer(TAGGED, 16, "agent", num_obstacles=1), "reads 12 numb"),
        ("simple_tag", observer(TAGGED, 16), "group 'all' mixes adversary, agent"),
        (
            "simple_tag",
            observer(TAGGED, 14, "agent", num_agent_neighbors=2),
            "expected num_agent_neighbors=None.*tokenizer=features",
        ),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(name, subject, message):
    with pytest.raises(InputError, match=message) as caught:
        make_tokenizer(name, subject)
    assert str(caught.value).startswith("env.tokenizer: ")
    assert "\n" not in str(caught.value)


class Fixed(Tokenizer):
    """A custom tokenizer that does what the test says."""

    fault = ""

    def __init__(self, observer: Observer) -> None:
        spec = TokenSpec(2, 2, ("self", "other"))
        super().__init__(observer, spec, [0, 5 if self.fault == "types" else 1])

    def __call__(self, observations: torch.Tensor) -> Tokens:
        if self.fault == "size":
            return self.tokens(observations.unflatten(1, (7, -1)))
        tokens = self.tokens(observations[:, :4].unflatten(1, (2, 2)))
        if self.fault == "features":
            return tokens._replace(features=tokens.features[:1])
        if self.fault == "padding":
            return tokens._replace(padding=tokens.padding.float())
        return tokens


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("size", "does not fit observations of 4 numbers: .*"),
        ("features", r"features of shape \(2, 2, 2\), got \(1, 2, 2\)"),
        ("padding", r"padding of shape \(2, 2\) and torch.bool, got .*float32"),
        ("types", "expected types below 2, got 5"),
    ],
)
def test_custom_tokenizer_is_validated_before_use(monkeypatch, fault, message):
    options: dict[str, Any] = {
        "module": "mpe2.simple_v3",
        "tokenizer": f"{__name__}:Fixed",
    }
    assert PettingZooEnv(1, **options).groups["agent"].tokens.num_tokens == 2
    monkeypatch.setattr(Fixed, "fault", fault)
    with pytest.raises(InputError, match=message) as caught:
        PettingZooEnv(1, **options)
    assert "\n" not in str(caught.value)


def test_a_class_that_is_no_tokenizer_is_refused():
    with pytest.raises(InputError, match="must be a subclass of .*Tokenizer"):
        make_tokenizer("marl_pool.pooling.ada:AdaPooling", observer("agent_0", 4))


def test_tokenizers_are_listed(capsys):
    assert main(["list", "tokenizers"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in TOKENIZERS)


# The guide


def test_the_guide_s_example_works(tmp_path, monkeypatch):
    text = GUIDE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n# my_tokens.py\n(.*?)^```$", text, re.M | re.S)
    (tmp_path / "my_tokens.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tokens", raising=False)
    env = PettingZooEnv(2, module="mpe2.simple_v3", tokenizer="my_tokens:Pairs", seed=2)
    env.reset()
    tokens = env.observe()["agent"]
    assert tokens.types[0, 0].tolist() == [0, 1]
    inner = env._cursors[0].simulator.inner.env.unwrapped.world
    relation = relative(inner.agents[0], inner.landmarks[0])
    np.testing.assert_allclose(tokens.features[0, 0, 1], relation, atol=1e-6)


def test_the_guide_s_commands_and_names_exist():
    text = GUIDE.read_text(encoding="utf-8")
    lines = re.findall(r"^marl-pool (.*)$", text, re.M)
    for line in lines:
        command, overrides = arguments.parse(line.partition("#")[0].split())
        if command.verb == "train":
            compose("train", overrides)
    table = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert sorted(table) == sorted(TOKENIZERS)
