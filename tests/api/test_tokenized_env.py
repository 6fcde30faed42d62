"""Environments whose observations become tokens."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import marl_pool
from helpers.changing_agents import ChangingAgents
from marl_pool.api.tokenize import ParallelTokenObservation, TokenObservation
from marl_pool.utils.errors import InputError

# The checkers advise against dict observations, unbounded features and wrappers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Observation is not a NumPy array"),
    pytest.mark.filterwarnings("ignore:Observation space for each agent probably"),
    pytest.mark.filterwarnings("ignore:.*A Box observation space m"),
    pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version"),
    pytest.mark.filterwarnings("ignore:The old environment creation API"),
]


class Sampled(gymnasium.Env):
    """Observations sampled from a space, in episodes of five steps."""

    def __init__(self, space: spaces.Space) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.time += 1
        observation = self.observation_space.sample()
        return observation, float(action), self.time == 5, False, {}


ROWS = spaces.Box(-1, 1, (4, 3))
TABLE = [
    (spaces.Box(-1, 1, (3,)), {}),
    (ROWS, {"presence": 0}),
    (spaces.Dict({"self": spaces.Box(-1, 1, (2,)), "others": ROWS}), {}),
    (spaces.Dict({"rows": ROWS, "action_mask": spaces.MultiBinary(2)}), {}),
    (spaces.Discrete(5), {}),
]


@pytest.mark.parametrize(("space", "options"), TABLE)
@pytest.mark.parametrize("added", [None, 4])
def test_gymnasiums_checker_accepts_it(space, options, added):
    inner = Sampled(space)
    num_tokens = marl_pool.make_view(space).spec.num_tokens
    if added is not None:
        options = {**options, "max_tokens": num_tokens + added}
    env = marl_pool.tokenize_env(inner, **options)
    check_env(env, skip_render_check=True)
    observation, _ = env.reset(seed=3)
    assert observation["padding"].shape == (num_tokens + (added or 0),)
    assert observation["padding"][num_tokens:].all()
    # Read from the space alone, no token is the observer's that was not named self.
    is_self = observation["types"] == 0
    assert is_self[~observation["padding"]].sum() == ("'self'" in str(space))


def test_pettingzoos_checkers_accept_it():
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    def make():
        return marl_pool.tokenize_env(
            marl_pool.make_env("simple_centroid", counts="3-2-4", max_steps=8),
            max_tokens=16,
        )

    assert isinstance(make(), ParallelTokenObservation)
    parallel_api_test(make(), num_cycles=30)
    parallel_seed_test(make)


def test_agents_are_observed_only_while_present():
    env = marl_pool.tokenize_env(ChangingAgents(), max_tokens=5)
    plain = ChangingAgents()
    observations, _ = env.reset(seed=0)
    expected, _ = plain.reset(seed=0)
    for _ in range(3):
        assert observations.keys() == expected.keys()
        for agent, observation in observations.items():
            present = observation["features"][~observation["padding"]]
            np.testing.assert_array_equal(present.ravel(), expected[agent])
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        observations, *_ = env.step(actions)
        expected, *_ = plain.step(actions)


def test_a_perturbation_selects_tokens_by_type_names():
    space = spaces.Dict({"self": spaces.Box(-1, 1, (2,)), "others": ROWS})
    tokens = marl_pool.tokenize_env(Sampled(space), signal_types=["self"])
    env = marl_pool.perturb_env(
        tokens, {"name": "occlude", "among": "noise", "severity": 1}
    )
    observation, _ = env.reset(seed=0)
    assert observation["padding"].tolist() == (observation["types"] == 1).tolist()


def test_an_equal_env_is_made_from_its_spec():
    env = marl_pool.tokenize_env(gymnasium.make("CartPole-v1"), max_tokens=6)
    copy = gymnasium.make(env.spec)
    assert isinstance(copy, TokenObservation)
    assert copy.observation_space == env.observation_space


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (3, {}, "env: expected a PettingZoo ParallelEnv or a Gymnasium Env, got int"),
        (Sampled(ROWS), {"presense": 0}, "Did you mean 'presence'"),
        (Sampled(ROWS), {"presence": "x"}, "presence: expected an integer >= 0"),
        (Sampled(ROWS), {"max_tokens": 3}, "max_tokens: expected at least 4, the tok"),
        (Sampled(spaces.Text(3)), {}, "env: expected observations that can become"),
    ],
)
def test_wrong_arguments_are_named(env, options, message):
    with pytest.raises(InputError, match=message):
        marl_pool.tokenize_env(env, **options)


def test_an_observation_outside_its_space_is_refused():
    inner = Sampled(ROWS)
    env = marl_pool.tokenize_env(inner)
    inner.observation_space = spaces.Box(5, 6, (4, 3))
    with pytest.raises(InputError, match=r"env: expected numbers in \[-1, 1\]"):
        env.reset(seed=0)
