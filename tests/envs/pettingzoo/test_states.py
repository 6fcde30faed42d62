"""The state of PettingZoo environments as tokens: forms, workers, replays, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv

from helpers.changing_agents import ChangingAgents
from marl_pool.envs import make_batched_env
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

WORLD_COMM = "mpe2.simple_world_comm_v3"
HERE = __name__


class Pitch(ParallelEnv):
    """Two agents, one of which may leave; a ball and two players are the state."""

    def __init__(self, form: str = "vector") -> None:
        self.form, self.possible_agents = form, ["home_0", "home_1"]
        if form == "declared":
            self.state_space = spaces.Dict(
                ball=spaces.Box(-1, 1, (2,)), players=spaces.Box(-1, 1, (2, 3))
            )

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.number = [*self.possible_agents], 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.number += 1
        ended = {agent: agent == "home_1" for agent in self.agents}
        self.agents = ["home_0"]
        flags = dict.fromkeys(ended, False)
        return self._seen(), dict.fromkeys(ended, 0.0), ended, flags, {}

    def _seen(self):
        return {
            agent: np.array([0.5, self.number / 10], np.float32)
            for agent in self.possible_agents
        }

    def state(self):
        numbers = np.arange(8, dtype=np.float32) / 10
        match self.form:
            case "declared":
                return {"ball": numbers[:2], "players": numbers[2:].reshape(2, 3)}
            case "set":
                return np.concatenate([*self._seen().values()])
            case "shrinks" if self.number:
                return numbers[1:]
            case "beyond":
                return {"ball": numbers}
            case "raises":
                raise RuntimeError("boom")
            case "nan":
                return np.full(8, np.nan if self.number else 0.0, np.float32)
            case "integers":
                return np.arange(8)
        return numbers


def pitch(form: str, num_envs: int = 1, **options: Any) -> PettingZooEnv:
    env = make_batched_env(
        "pettingzoo",
        num_envs,
        module=f"{HERE}:Pitch",
        options={"form": form},
        max_steps=5,
        **options,
    )
    assert isinstance(env, PettingZooEnv)
    env.reset()
    return env


def states_of(env: PettingZooEnv) -> dict[str, Tokens]:
    states = env.observe_state()
    assert states.keys() == env.state_specs.keys() == env.groups.keys()
    for name, tokens in states.items():
        env.state_specs[name].check(tokens)
        assert tokens.batch_shape == (env.num_envs, env.groups[name].num_agents)
    return states


def zeros(env: PettingZooEnv) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(env.num_envs, group.num_agents, dtype=torch.int64)
        for name, group in env.groups.items()
    }


def test_concatenated_observations_are_a_set_of_agents():
    env = make_batched_env("pettingzoo", 2, module=WORLD_COMM)
    env.reset()
    raw = [cursor.simulator.inner.env.unwrapped for cursor in env._cursors]
    env.step(zeros(env))
    agents = raw[0].possible_agents
    for group, tokens in states_of(env).items():
        spec = env.state_specs[group]
        for row, unwrapped in enumerate(raw):
            vectors = {a: unwrapped.observe(a) for a in agents}
            for number, observer in enumerate(env._teams[group].agents):
                for token, agent in enumerate(agents):
                    numbers = tokens.features[row, number, token].numpy()
                    size = len(vectors[agent])
                    np.testing.assert_array_equal(numbers[:size], vectors[agent])
                    assert not numbers[size:].any()
                    kind = spec.type_names[tokens.types[row, number, token]]
                    expected = "self" if agent == observer else agent.rpartition("_")[0]
                    assert kind == expected
        assert not tokens.padding.any()


def test_agents_that_are_gone_are_padding():
    env = pitch("set")
    assert not states_of(env)["home"].padding.any()
    env.step(zeros(env))
    # The second agent is gone; its own token is no padding, its values do not count.
    assert states_of(env)["home"].padding.tolist() == [[[False, True], [False, False]]]


@pytest.mark.parametrize(
    ("form", "options", "shape", "names"),
    [
        ("vector", None, (8, 1), [f"feature_{i}" for i in range(8)]),
        ("integers", None, (8, 1), [f"feature_{i}" for i in range(8)]),
        ("declared", None, (3, 3), ["ball", "players"]),
        ("set", None, (2, 2), ["self", "home"]),
        ("set", {}, (4, 1), [f"feature_{i}" for i in range(4)]),
        (
            "vector",
            {
                "slices": {
                    "ball": [0, 2],
                    "players": {"start": 2, "count": 2, "features": 3},
                }
            },
            (3, 3),
            ["ball", "players"],
        ),
        (
            "vector",
            {"tokenizer": "marl_pool.envs.tokenizers.base:FeatureTokenizer"},
            (8, 1),
            [f"feature_{i}" for i in range(8)],
        ),
    ],
)
def test_a_state_becomes_what_an_observation_of_its_space_does(
    form, options, shape, names
):
    env = pitch(form, 2, state_tokens=options)
    tokens, spec = states_of(env)["home"], env.state_specs["home"]
    assert tokens.features.shape == (2, 2, *shape)
    assert list(spec.type_names) == names
    if form != "set":
        assert torch.equal(tokens.features[:, 0], tokens.features[:, 1])


def test_workers_selections_and_replays_show_the_same_states():
    envs = [
        make_batched_env("pettingzoo", 2, module=WORLD_COMM, workers=workers)
        for workers in (1, 2)
    ]
    for env in envs:
        env.reset()
        env.step(zeros(env))
    expected = states_of(envs[0])
    for env in envs:
        selected = env.select(torch.tensor([1, 0]))
        env.step(zeros(env))
        # The others' simulators are a step ahead, so these are replayed.
        states = states_of(selected)
        for name, tokens in states.items():
            reordered = expected[name].at(torch.tensor([1, 0]))
            assert all(map(torch.equal, tokens.parts, reordered.parts))


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("beyond", None, "expected state.. to return an array of numbers, or .*got di"),
        ("vector", {"sclices": {}}, "env.state_tokens.sclices: unknown key 'sclices'"),
        ("vector", {"slices": 3}, "env.state_tokens.slices: .*got 3"),
        ("vector", {"slices": {"a": [0, 9]}}, "env.state_tokens.slices.a: .*8 numbers"),
        (
            "vector",
            {"patch": 3},
            "env.state_tokens.patch: expected null, since the obs",
        ),
        ("vector", {"tokenizer": "featurs"}, "unknown env.state_tokens.tokenizer"),
        ("raises", None, r"state\(\) of Pitch raised RuntimeError"),
    ],
)
def test_states_and_options_that_do_not_fit_are_refused(form, options, message):
    with pytest.raises(InputError, match=message):
        pitch(form, state_tokens=options).state_specs  # noqa: B018


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("shrinks", r"env.module: state\(\): .*shape"),
        ("nan", r"state\(\): expected finite numbers"),
    ],
)
def test_a_state_that_does_not_fit_later_is_refused(form, message):
    env = pitch(form)
    states_of(env)
    env.step(zeros(env))
    with pytest.raises(InputError, match=message):
        env.observe_state()


def test_no_group_has_the_name_of_the_agent_itself():
    env = pitch("set", groups={"self": ["home_0"], "rest": ["home_1"]})
    with pytest.raises(InputError, match=r"env.groups: expected names other than 'sel"):
        env.state_specs  # noqa: B018


def test_an_environment_that_defines_no_state_says_so():
    env = PettingZooEnv(1, module="helpers.changing_agents:ChangingAgents")
    name = ChangingAgents.__name__
    with pytest.raises(
        InputError, match=f"an environment that defines state.., got {name}, which does"
    ):
        env.state_specs  # noqa: B018
