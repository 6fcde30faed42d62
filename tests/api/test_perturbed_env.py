"""Perturbation wrappers of PettingZoo and Gymnasium envs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from pettingzoo.utils import BaseParallelWrapper
from torch import Tensor

import marl_pool
from helpers.changing_agents import ChangingAgents
from marl_pool.api.perturb import PerturbedEnv, PerturbedParallelEnv, perturb_env
from marl_pool.envs import make_batched_env, make_env, registered_id
from marl_pool.envs.views import OneAgentView
from marl_pool.perturbations import PERTURBATIONS, make_perturbation
from marl_pool.policies.base import Decision, Policy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

OPTIONS: dict[str, dict[str, Any]] = {
    "inject": {"count": 3, "severity": [0.2, 1.0]},
    "duplicate": {"severity": [0.2, 1.0]},
    "occlude": {"among": "signal", "every": 2},
}
CENTROID = {"counts": "3-2-4", "max_steps": 8}
SEED = 5
every = pytest.mark.parametrize("name", PERTURBATIONS)
FORMS = ["drop_actions", "duplicate", "freeze", "inject", "occlude"]
"""One perturbation of each form: of actions, of memory, of padding, adding tokens."""
each_form = pytest.mark.parametrize("name", FORMS)

# The checkers advise against dict observations, unbounded features and wrappers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Observation is not a NumPy array"),
    pytest.mark.filterwarnings("ignore:Observation space for each agent probably"),
    pytest.mark.filterwarnings("ignore:.*A Box observation space m"),
    pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version"),
    pytest.mark.filterwarnings("ignore:The old environment creation API"),
]


def config_of(name: str) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get(name, {})}


class TokenAgents(ChangingAgents):
    """Changing agents whose observations are three tokens of one feature each."""

    def observation_space(self, agent: str) -> spaces.Dict:
        return spaces.Dict(
            features=spaces.Box(-99, 99, (3, 1), np.float64),
            types=spaces.Box(0, 2, (3,), np.int32),
            padding=spaces.Box(0, 1, (3,), np.bool_),
        )

    def _observe(self, agents: Any) -> dict[str, Any]:
        types, padding = np.arange(3, dtype=np.int32), np.zeros(3, np.bool_)
        return {
            agent: {
                "features": np.full((3, 1), float(self.time)),
                "types": types,
                "padding": padding,
            }
            for agent in agents
        }


class NoopPolicy(Policy):
    """Never acts."""

    def act(
        self,
        tokens: Tokens,
        state: Any = (),
        generator: Any = None,
        explore: bool = False,
    ) -> Decision:
        zeros = torch.zeros(tokens.batch_shape)
        action = torch.zeros(*tokens.batch_shape, 5)
        return Decision(action, zeros, zeros, zeros, ())


class BitEnv(gymnasium.Env[Any, Any]):
    """Two tokens of one bit."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: Any, high: int = 1) -> None:
        self.features = np.array([[0], [1]], dtype)
        self.observation_space = spaces.Dict(
            features=spaces.Box(0, high, (2, 1), dtype),
            types=spaces.MultiDiscrete([2, 2]),
            padding=spaces.MultiBinary(2),
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        parts = {"types": np.array([0, 1]), "padding": np.zeros(2, np.int8)}
        return {"features": self.features, **parts}, {}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_features_of_integers_become_floats_unless_they_are_bytes(dtype: Any) -> None:
    env = perturb_env(BitEnv(dtype), {"name": "jitter", "scale": 0.1})
    features = env.reset(seed=0)[0]["features"]
    assert features.dtype == env.observation_space["features"].dtype == np.float32
    assert 0 < abs(features[1, 0] - 1) < 1
    noisy = perturb_env(BitEnv(np.uint8, high=255), "jitter")
    assert noisy.reset(seed=0)[0]["features"].dtype == np.uint8


@each_form
def test_pettingzoo_checkers_accept_it(name: str) -> None:
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    def make() -> PerturbedParallelEnv:
        env = perturb_env(make_env("simple_centroid", **CENTROID), config_of(name))
        assert isinstance(env, PerturbedParallelEnv)
        return env

    parallel_api_test(make(), num_cycles=30)
    parallel_seed_test(make)


@each_form
def test_gymnasium_checkers_accept_it(name: str) -> None:
    env = perturb_env(OneAgentView("simple_centroid", max_steps=8), config_of(name))
    assert isinstance(env, PerturbedEnv)
    check_env(env, skip_render_check=True)


def batched(
    name: str, group: str, seed: int, env_name: str, **options: Any
) -> list[Any]:
    """Observations of one batched environment in two episodes without actions."""
    env = make_batched_env(env_name, 1, seed=seed, **options)
    specs = {key: group_spec.tokens for key, group_spec in env.groups.items()}
    perturbation = make_perturbation(specs=specs, **config_of(name))
    policies = {name: NoopPolicy() for name in env.groups}
    rollout = Rollout(env, policies, perturbation=perturbation)
    return [rollout.steps(1)[group].tokens.at((0, 0)) for _ in range(16)]


@every
def test_observations_equal_those_of_a_rollout(name: str) -> None:
    env = perturb_env(make_env("simple_centroid", **CENTROID), config_of(name))
    expected = iter(batched(name, "agent", SEED, "simple_centroid", **CENTROID))
    still = {agent: np.zeros(5, np.float32) for agent in env.possible_agents}
    for episode in range(2):
        obs, _ = env.reset(seed=SEED if episode == 0 else None)
        for _ in range(8):
            tokens = next(expected)
            for number, agent in enumerate(env.possible_agents):
                for part, tensor in tokens.at(number).columns.items():
                    np.testing.assert_array_equal(obs[agent][part], tensor.numpy())
            obs, *_ = env.step(still)


class Few(BaseParallelWrapper[Any, Any, Any]):
    """The first two agents of an environment, with other names."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.names = {f"robot_{n}": a for n, a in enumerate(env.possible_agents[:2])}
        self.possible_agents = [*self.names]

    def observation_space(self, agent: Any) -> Any:
        return self.env.observation_space(self.names[agent])

    def action_space(self, agent: Any) -> Any:
        return self.env.action_space(self.names[agent])

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        results = self.env.reset(seed=seed, options=options)
        return [{n: part[a] for n, a in self.names.items()} for part in results]


def test_a_wrapper_may_rename_agents_and_leave_some_out() -> None:
    env = perturb_env(Few(make_env("simple_centroid", **CENTROID)), "occlude")
    observations, _ = env.reset(seed=0)
    assert [*observations] == ["robot_0", "robot_1"]


@each_form
@pytest.mark.parametrize("numbers", [{}, {"first_env": 3, "first_episode": 2}])
def test_a_gymnasium_env_shows_it_too(name: str, numbers: dict[str, int]) -> None:
    options = {"counts": "1-2-4", "max_steps": 8, **numbers}
    env = perturb_env(OneAgentView("simple_centroid", **options), config_of(name))
    expected = iter(batched(name, "agent", SEED, "simple_centroid", **options))
    observation, _ = env.reset(seed=SEED)
    for _ in range(8):
        for part, tensor in next(expected).at(0).columns.items():
            np.testing.assert_array_equal(observation[part], tensor.numpy())
        observation, *_ = env.step(np.zeros(5, np.float32))


def test_the_space_grows_with_the_tokens() -> None:
    plain = make_env("simple_centroid", **CENTROID)
    env = perturb_env(plain, {"name": "inject", "token_type": "noise", "count": 3})
    for agent in env.possible_agents:
        space = env.observation_space(agent)
        assert space is env.observation_space(agent)
        assert space["features"].shape == (12, 4)
        assert plain.observation_space(agent)["features"].shape == (9, 4)
    obs, _ = env.reset(seed=1)
    assert all(env.observation_space(agent).contains(obs[agent]) for agent in obs)


def test_registered_ids_and_made_perturbations() -> None:
    perturbation = make_perturbation("occlude", severity=1.0)
    for env in (
        gymnasium.make(registered_id("simple_centroid")),
        pettingzoo.make("parallel", registered_id("simple_centroid")),
    ):
        observation, _ = marl_pool.perturb_env(env, perturbation, seed=3).reset(seed=3)
        observation = observation.get("agent_0", observation)
        assert observation["padding"].tolist() == [False] + [True] * 31


def first_padding(seed: int, reset: int | None = None, resets: int = 1) -> Any:
    env = perturb_env(
        make_env("simple_centroid", counts="1-3-28", seed=0), "occlude", seed=seed
    )
    for _ in range(resets):
        obs, _ = env.reset(seed=reset)
    return obs["agent_0"]["padding"].tolist()


def test_seeds() -> None:
    assert first_padding(1) == first_padding(1)
    assert first_padding(1) != first_padding(2)
    assert first_padding(1, reset=7) == first_padding(2, reset=7)
    assert first_padding(1) != first_padding(1, resets=2)
    assert first_padding(1, reset=7) == first_padding(1, reset=7, resets=2)


def test_a_ramp_grows_with_the_episodes() -> None:
    ramped = {"name": "occlude", "severity": 1.0, "ramp": 2}
    env = perturb_env(make_env("simple_centroid", counts="1-3-28", seed=0), ramped)
    missing = [env.reset()[0]["agent_0"]["padding"].sum() for _ in range(4)]
    assert missing == [0, 16, 31, 31]


def test_a_custom_env_of_tokens_with_changing_agents() -> None:
    """Agents come and go; absent ones have neither observations nor actions."""
    env = perturb_env(TokenAgents(horizon=30), {"name": "occlude", "severity": 0.5})
    obs, _ = env.reset(seed=0)
    assert set(obs) == set(env.agents)
    populations = set()
    while env.agents:
        populations.add(tuple(env.agents))
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        obs, rewards, *_ = env.step(actions)
        assert set(rewards) <= set(obs)
        for agent, observation in obs.items():
            assert env.observation_space(agent).contains(observation)
            assert observation["padding"].sum() == 1
            assert not observation["padding"][0]
    assert len(populations) > 3


EXPECTED = "perturbation: expected a Perturbation, a name, or .*"


@pytest.mark.parametrize(
    ("perturbation", "message"),
    [
        ("oclude", "unknown perturbation"),
        ({"severity": 0.2}, f"{EXPECTED} got {{'severity': 0.2}}; choose"),
        ({"name": None}, f"{EXPECTED} got {{'name': None}}"),
        (None, f"{EXPECTED} got None"),
        ({"name": "occlude", "specs": {}}, "perturbation.specs: expected none"),
        (
            {"name": "occlude", "severity": "x"},
            r"perturbation.severity: expected a number in \[0, 1\].* got 'x'",
        ),
        (
            {"name": "jitter", "features": [9]},
            r"perturbation.features: expected numbers below 4, got \[9\]",
        ),
        (
            {"name": "inject", "position_features": [9]},
            r"perturbation.position_features: expected numbers below 4, got \[9\]",
        ),
    ],
)
def test_a_wrong_perturbation_is_refused(perturbation: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        perturb_env(make_env("simple_centroid"), perturbation)


@pytest.mark.parametrize(
    ("make", "perturbation", "message"),
    [
        (lambda: 3, "occlude", "env: expected a PettingZoo ParallelEnv or a Gymn"),
        (
            lambda: gymnasium.make("CartPole-v1"),
            "occlude",
            "env: agent 'agent': expected observations in a Dict of features, types",
        ),
        (
            lambda: TokenAgents(horizon=30),
            {"name": "inject", "token_type": 1},
            "position_features: expected numbers of features, since these tokens",
        ),
    ],
)
def test_invalid_perturbations_and_envs_are_refused(make, perturbation, message):
    with pytest.raises(InputError, match=message):
        perturb_env(make(), perturbation)


class Malformed(TokenAgents):
    """Agents of which one observation, in the second step, has a malformed part."""

    part, value = "features", None

    def _observe(self, agents: Any) -> dict[str, Any]:
        observations = super()._observe(agents)
        if self.time == 2:
            first = next(iter(observations.values()))
            first[self.part] = self.value
            if self.value is None:
                del first[self.part]
        return observations


@pytest.mark.parametrize("name", ["bias", "occlude"])
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("features", np.zeros((1, 1)), r"part 'features': expected .* shape \(3, 1\)"),
        ("features", np.zeros((3, 5)), r"part 'features': expected .* got \(3, 5\)"),
        ("features", "abc", "part 'features': expected"),
        ("features", np.full((3, 1), np.nan), "NaN or infinite: .* at step 2"),
        ("types", None, "part 'types'"),
        (
            "types",
            np.array([0, 9, 1]),
            r"part 'types': .* in \[0, 2\].* got 9",
        ),
    ],
)
def test_malformed_tokens_are_refused(name, part, value, message):
    env = Malformed(horizon=30)
    env.part, env.value = part, value
    perturbed = perturb_env(env, name)
    perturbed.reset(seed=0)
    perturbed.step({agent: env.action_space(agent).sample() for agent in env.agents})
    actions = {agent: env.action_space(agent).sample() for agent in env.agents}
    with pytest.raises(InputError, match=message):
        perturbed.step(actions)


@pytest.mark.parametrize(
    "make",
    [
        partial(make_env, "simple_centroid"),
        partial(OneAgentView, "simple_centroid"),
        partial(TokenAgents, horizon=30),
    ],
)
def test_a_step_before_reset_is_one_line(make: Callable[[], Any]) -> None:
    env = perturb_env(make(), "occlude")
    with pytest.raises(InputError, match=r"Cannot call env.step\(\) before calling"):
        env.step({})
    obs, _ = env.reset(seed=0)
    assert obs


def test_the_envs_own_arrays_stay_as_they_are() -> None:
    copy: dict[str, Tensor] = {}

    class Keeping(OneAgentView):
        def reset(self, **options: Any) -> Any:
            observation, info = super().reset(**options)
            copy.update({k: torch.from_numpy(v.copy()) for k, v in observation.items()})
            self.last = observation
            return observation, info

    env = Keeping("simple_centroid")
    perturb_env(env, {"name": "jitter", "severity": 1.0}).reset(seed=0)
    for part, array in env.last.items():
        np.testing.assert_array_equal(array, copy[part].numpy())


def test_the_env_is_rebuilt_from_its_spec() -> None:
    plain = gymnasium.make("marl_pool/simple_centroid-v0", num_noise=2, max_steps=5)
    env = perturb_env(plain, {"name": "occlude", "severity": 0.5}, seed=3)
    copy = gymnasium.make(env.spec)
    first, second = (instance.reset(seed=1)[0] for instance in (env, copy))
    assert all(np.array_equal(first[part], second[part]) for part in first)
    assert first["padding"].any()


def tokens_with_actions(space: spaces.Box) -> Any:
    """An env of one token whose actions are in a Box, and which keeps the last one."""

    class Boxed(gymnasium.Env[Any, Any]):
        action_space = space
        observation_space = spaces.Dict(
            features=spaces.Box(-9, 9, (1, 1)),
            types=spaces.Box(0, 1, (1,), np.int64),
            padding=spaces.Box(0, 1, (1,), np.bool_),
        )

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            zero = np.zeros((1, 1), np.float32)
            types, padding = np.zeros(1, np.int64), np.zeros(1, np.bool_)
            return {"features": zero, "types": types, "padding": padding}, {}

        def step(self, action: Any) -> Any:
            self.executed = action
            return *self.reset()[:1], 0.0, False, False, {}

    return Boxed()


@pytest.mark.parametrize("name", ["action_noise", "drop_actions"])
@pytest.mark.parametrize(
    ("space", "action", "dtype"),
    [
        (spaces.Box(0, 10, (2,), np.int64), np.array([5, 5]), np.int64),
        (spaces.Box(0, 10, (2,), np.int64), [5, 5], np.int64),
        (spaces.Box(-1, 1, (2,)), [0, 0], np.float32),
        (spaces.Box(-1, 1, (2,)), np.zeros(2), np.float64),
        (spaces.Box(-1, 1, (2,)), np.zeros(2, np.float32), np.float32),
    ],
)
def test_numbers_of_any_dtype_are_perturbed(name, space, action, dtype) -> None:
    env = tokens_with_actions(space)
    perturbed = perturb_env(env, {"name": name, "severity": 1.0})
    perturbed.reset(seed=0)
    perturbed.step(action)
    assert env.executed.dtype == dtype
    assert space.contains(env.executed.astype(space.dtype))
    assert name == "drop_actions" or not np.array_equal(env.executed, action)


@pytest.mark.parametrize(
    "action", [np.zeros(3), 0.5, "ab", [[1], [2, 3]], [0.0, np.nan]]
)
def test_an_action_of_another_form_is_one_line(action: Any) -> None:
    perturbed = perturb_env(
        tokens_with_actions(spaces.Box(-1, 1, (2,))), "action_noise"
    )
    perturbed.reset(seed=0)
    message = (
        r"^env: agent 'agent': action: expected Box\(-1.0, 1.0, \(2,\), float32\), got"
    )
    with pytest.raises(InputError, match=message):
        perturbed.step(action)


class LateTokens(TokenAgents):
    """No hen is there before the second step."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed, options)
        self.agents = [agent for agent in self.agents if agent.startswith("wolf")]
        return self._observe(self.agents), {agent: {} for agent in self.agents}


@pytest.mark.parametrize("name", ["delay", "freeze"])
def test_a_group_in_float64_may_begin_late(name: str) -> None:
    env = perturb_env(LateTokens(wolves=1, hens=2, death=0.0, birth=1.0), name)
    observations, _ = env.reset(seed=4)
    for _ in range(3):
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        observations, *_ = env.step(actions)
    assert any(agent.startswith("hen") for agent in observations)
    assert observations["hen_0"]["features"].dtype == np.float64


def test_the_spaces_are_those_of_perturbed_observations() -> None:
    inner = make_env("simple_centroid", **CENTROID)
    env = perturb_env(inner, {"name": "inject", "count": 3})
    for agent in env.possible_agents:
        assert env.observation_spaces[agent] == env.observation_space(agent)
        assert env.observation_spaces[agent] != inner.observation_space(agent)
