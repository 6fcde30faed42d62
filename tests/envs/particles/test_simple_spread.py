"""Simple spread: starts, tokens, mpe2 as the oracle of steps and returns, a script."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpe2 import simple_spread_v3
from scipy.optimize import linear_sum_assignment

from marl_pool.envs import make_env, make_heuristic
from marl_pool.envs.particles.heuristics import nearest_pairs
from marl_pool.envs.particles.simple_spread import SimpleSpread
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout


class Oracle:
    """mpe2's env, from a state of our choice."""

    def __init__(self, state: np.ndarray, local_ratio: float, continuous: bool) -> None:
        self.env = simple_spread_v3.raw_env(
            N=len(state) // 2,
            local_ratio=local_ratio,
            max_cycles=10_000,
            continuous_actions=continuous,
        )
        self.env.reset(seed=0)
        for entity, row in zip(self.env.world.entities, state, strict=True):
            entity.state.p_pos, entity.state.p_vel = row[:2].copy(), row[2:].copy()

    def step(self, actions: np.ndarray) -> list[float]:
        for action in actions:
            self.env.step(action)
        return list(self.env.rewards.values())

    def state(self) -> np.ndarray:
        entities = self.env.world.entities
        return np.stack([[*e.state.p_pos, *e.state.p_vel] for e in entities])


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(("num_agents", "local_ratio"), [(1, 0.5), (3, 0.5), (5, 0.2)])
def test_every_step_agrees_with_mpe2(num_agents, local_ratio, continuous):
    num_envs, collisions = 8, 0
    env = SimpleSpread(
        num_envs,
        num_agents=num_agents,
        local_ratio=local_ratio,
        continuous_actions=continuous,
        dtype=torch.float64,
        max_steps=1000,
    )
    rng = np.random.default_rng(num_agents + continuous)
    state = rng.uniform(-0.4, 0.4, env.state.shape)  # close together: they collide
    state[:, num_agents:, 2:] = 0
    env.state.copy_(torch.from_numpy(state))
    oracles = [Oracle(row, local_ratio, continuous) for row in state]
    for _ in range(40):
        shape = (num_envs, num_agents)
        actions = (
            rng.uniform(0, 1, (*shape, 5)) if continuous else rng.integers(0, 5, shape)
        )
        rewards = env.step({"agent": torch.from_numpy(actions)}).rewards["agent"]
        expected = [o.step(row) for o, row in zip(oracles, actions, strict=True)]
        states = np.stack([oracle.state() for oracle in oracles])
        np.testing.assert_allclose(env.state, states, rtol=0, atol=1e-9)
        np.testing.assert_allclose(rewards, np.stack(expected), rtol=0, atol=1e-9)
        collisions += int((rewards.amax(1) - rewards.amin(1) > 0).sum())
    assert collisions > 10 or num_agents == 1


def test_starts_are_those_of_mpe2():
    env = SimpleSpread(4000)
    env.reset()
    assert env.state[..., 2:].abs().max() == 0
    position = env.state[..., :2]
    assert 0.999 < position.abs().max() <= 1
    assert position.mean().abs() < 0.01
    assert position.var() == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.parametrize("continuous", [False, True])
def test_random_actions_get_the_returns_of_mpe2(continuous):
    # Measured on mpe2 with 300 episodes, whose standard error is 0.5.
    env = SimpleSpread(2000, continuous_actions=continuous)
    policy = RandomPolicy(env.groups["agent"].action_space)
    returns = Rollout(env, {"agent": policy}).episodes().returns["agent"]
    expected = -24.8 if continuous else -26.5
    assert float(returns.mean()) == pytest.approx(expected, abs=1.5)


def test_tokens_are_seen_from_the_agent():
    env = SimpleSpread(3, num_agents=2, num_landmarks=4, dtype=torch.float64)
    env.reset()
    tokens = env.observe()["agent"]
    assert tokens.features.shape == (3, 2, 6, 4)
    assert tokens.types[0].tolist() == [[0, 1, 1, 1, 1, 2]] * 2
    away = env.state[:, None, 2:] - env.state[:, :2, None]
    torch.testing.assert_close(tokens.features[:, :, 1:5], away)
    assert env.groups["agent"].tokens.type_names == ("self", "landmark", "agent")


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_pairs_are_taken_nearest_first(num_rows, num_columns, seed):
    rng = np.random.default_rng(seed)
    distance = rng.permutation(num_rows * num_columns).reshape(num_rows, num_columns)
    expected, rest = [-1] * num_rows, distance.astype(float)
    for _ in range(min(num_rows, num_columns)):
        row, column = np.unravel_index(rest.argmin(), rest.shape)
        expected[row] = int(column)
        rest[row], rest[:, column] = np.inf, np.inf
    partner = nearest_pairs(torch.from_numpy(distance).double())
    assert partner.tolist() == expected
    # Twice the optimum at most would need a metric; it is never below it.
    pairs = [(row, column) for row, column in enumerate(expected) if column >= 0]
    best = distance[linear_sum_assignment(distance)].sum()
    assert sum(distance[pair] for pair in pairs) >= best


def test_pairs_that_are_not_allowed_are_none():
    distance = torch.tensor([[torch.inf, 1.0], [torch.inf, 2.0]])
    assert nearest_pairs(distance).tolist() == [1, -1]


@pytest.mark.parametrize("num_agents", [1, 3, 6])
def test_the_script_covers_the_landmarks(num_agents):
    env = SimpleSpread(200, num_agents=num_agents, continuous_actions=True)
    script = make_heuristic("simple_spread", env.groups["agent"], role=None)
    rewards = Rollout(env, {"agent": script}).steps(24)["agent"].rewards[-1]
    # Half of the sum of distances; agents of which some touch hinder each other.
    assert -rewards.amax(1).mean() < 0.12 * num_agents


def test_agents_without_a_landmark_rest():
    env = SimpleSpread(50, num_agents=3, num_landmarks=1)
    env.reset()
    script = make_heuristic("simple_spread", env.groups["agent"], role=None)
    force = script.act(env.observe()["agent"]).logits
    assert ((force == 0).all(-1).sum(1) == 2).all()


def test_pettingzoo_shows_the_team():
    env = make_env("simple_spread", num_agents=4)
    observations, _ = env.reset(seed=0)
    assert sorted(observations) == [f"agent_{i}" for i in range(4)]
    assert observations["agent_0"]["features"].shape == (8, 4)
