"""MPE's tasks: mpe2 as the oracle of steps, rewards, observations and starts."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.particles import mean_returns, mpe2_state, particles
from marl_pool.envs.particles.physics import ParticleEnv

VERSIONS = {
    "simple_speaker_listener": 4,
    "simple_reference": 3,
    "simple_adversary": 3,
    "simple_push": 3,
    "simple_spread": 3,
    "simple_tag": 3,
    "simple_world_comm": 3,
}
TAG = {"obstacles_collide": True, "shared_reward": True, "prey": "learned"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in VERSIONS if name != "simple_tag"),
    ("simple_adversary", {"num_agents": 4}, {"N": 4}),
    ("simple_reference", {"local_ratio": 0.2}, {"local_ratio": 0.2}),
    ("simple_spread", {"num_agents": 1}, {"N": 1}),
    (
        "simple_spread",
        {"num_agents": 5, "local_ratio": 0.2},
        {"N": 5, "local_ratio": 0.2},
    ),
    *(
        (
            "simple_tag",
            {**TAG, "counts": f"{predators}-{prey}-{obstacles}"},
            {
                "num_adversaries": predators,
                "num_good": prey,
                "num_obstacles": obstacles,
            },
        )
        for predators, prey, obstacles in ((3, 1, 2), (1, 3, 4), (2, 2, 0))
    ),
    (
        "simple_world_comm",
        {"num_agents": 3, "num_adversaries": 2, "num_food": 3, "num_forests": 1},
        {
            **{"num_good": 3, "num_adversaries": 3, "num_obstacles": 1},
            **{"num_food": 3, "num_forests": 1},
        },
    ),
]
# mpe2's landmarks that differ for an agent, by their colors.
COLORED = {"simple_speaker_listener", "simple_reference"}
STILL = ("speaker", "landmark", "obstacle", "food", "forest")
COLLIDING = {"simple_push", "simple_spread", "simple_tag", "simple_world_comm"}


class Oracle:
    """mpe2's env, from the state of environment ``row``."""

    def __init__(self, name: str, env: Any, row: int, **options: Any) -> None:
        module = importlib.import_module(f"mpe2.{name}_v{VERSIONS[name]}")
        self.env = module.raw_env(max_cycles=10_000, **options)
        self.env.reset(seed=0)
        self.world = self.env.unwrapped.world
        # Both list an agent's kind and number; mpe2 numbers the adversaries from 0.
        kinds = {kind: iter(range(s.start, s.stop)) for kind, s in env._slices.items()}
        self.rows, self.places = [], {}
        for agent in self.world.agents:
            kind = agent.name.split("_")[0]
            if name == "simple_tag":
                kind = {"adversary": "predator", "agent": "prey"}[kind]
            index = next(kinds[kind])
            self.rows.append(index)
            self.places[agent.name] = kind, index - env._slices[kind].start
        self.rows += [i for kind in STILL if kind in kinds for i in kinds[kind]]
        state = env.state[row].numpy()
        for entity, index in zip(self.world.entities, self.rows, strict=True):
            entity.state.p_pos = state[index, :2].copy()
            entity.state.p_vel = state[index, 2:].copy()
        # Goals, with the colors of goals that reset_world gives.
        goals = env.goal[row].tolist() if hasattr(env, "goal") else []
        if len(goals) == 1 and hasattr(self.world.agents[0], "adversary"):
            goals *= len(self.world.agents)
        for agent, number in zip(self.world.agents, goals, strict=False):
            goal = self.world.landmarks[number]
            if name in COLORED:
                agent.goal_b = goal
            else:
                agent.goal_a = goal
            if name == "simple_push" and not agent.adversary:
                agent.color = np.full(3, 0.25)
                agent.color[number + 1] += 0.5

    def step(self, actions: dict[str, np.ndarray]) -> dict[str, float]:
        for agent in self.env.agents:
            kind, index = self.places[agent]
            self.env.step(actions[kind][index])
        return self.env.rewards

    def observation(self, agent: Any) -> np.ndarray:
        return self.env.unwrapped.scenario.observation(agent, self.world)


def sample(env: ParticleEnv, rng: np.random.Generator) -> dict[str, np.ndarray]:
    actions = {}
    for name, group in env.groups.items():
        shape, space = (env.num_envs, group.num_agents), group.action_space
        actions[name] = (
            rng.integers(0, space.n, shape)
            if isinstance(space, spaces.Discrete)
            else rng.uniform(0, 1, (*shape, *space.shape))
        )
    return actions


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(("name", "options", "mpe2_options"), CASES)
def test_steps_match_mpe2(name, options, mpe2_options, continuous):
    actions_of = {"continuous_actions": continuous}
    env = particles(name, 3, max_steps=1000, **actions_of, **options)
    rng = np.random.default_rng(3)
    # Close together: they touch.
    env.state[..., :2] = torch.from_numpy(
        rng.uniform(-0.4, 0.4, env.state[..., :2].shape)
    )
    oracles = [Oracle(name, env, row, **actions_of, **mpe2_options) for row in range(3)]
    contacts = 0
    for _ in range(30):
        actions = sample(env, rng)
        contacts += int((env.contact_forces() != 0).any(-1).sum())
        rewards = env.step({k: torch.from_numpy(v) for k, v in actions.items()}).rewards
        observations = env.observe()
        for row, oracle in enumerate(oracles):
            expected = oracle.step({kind: part[row] for kind, part in actions.items()})
            assert env.groups.keys() == {kind for kind, _ in oracle.places.values()}
            state = mpe2_state(oracle.world)
            actual = env.state[row, oracle.rows]
            np.testing.assert_allclose(actual, state, rtol=0, atol=1e-9)
            for agent in oracle.world.agents:
                kind, index = oracle.places[agent.name]
                reward = float(rewards[kind][row, index])
                assert reward == pytest.approx(expected[agent.name], abs=1e-9)
                if name not in VECTORS:
                    continue
                tokens = observations[kind].at((row, index))
                by_type = {
                    type_name: tokens.features[tokens.types == number].numpy()
                    for number, type_name in enumerate(env.type_names)
                }
                vector = VECTORS[name](kind, by_type)
                expected_vector = oracle.observation(agent)
                np.testing.assert_allclose(vector, expected_vector, rtol=0, atol=1e-9)
    assert contacts > 10 or name not in COLLIDING or options.get("num_agents") == 1


def speaker_listener(kind, by_type):
    if kind == "speaker":
        return 0.15 + 0.5 * by_type["self"][0, 4:]
    landmarks = by_type["landmark"]
    assert (landmarks[:, 4:7] == np.eye(3)).all()
    words = by_type["speaker"][0, 7:]
    return np.concatenate([-landmarks[0, 2:4], landmarks[:, :2].ravel(), words])


def reference(kind, by_type):
    landmarks = by_type["landmark"]
    assert (landmarks[:, 4:7] == np.eye(3)).all()
    goal = 0.25 + 0.5 * by_type["self"][0, 4:7]
    words = by_type["agent"][0, 7:]
    return np.concatenate([-landmarks[0, 2:4], landmarks[:, :2].ravel(), goal, words])


def adversary(kind, by_type):
    landmarks = by_type["landmark"]
    players = np.concatenate([by_type["adversary"], by_type["agent"]])
    goal = landmarks[landmarks[:, 4] == 1, :2] if kind == "agent" else players[:0]
    return np.concatenate([part[:, :2].ravel() for part in (goal, landmarks, players)])


def push(kind, by_type):
    landmarks, vector = by_type["landmark"], adversary(kind, by_type)
    velocity = -landmarks[0, 2:4]
    if kind == "adversary":
        return np.concatenate([velocity, vector])
    # The colors of landmarks are constant; the agent's tells the goal.
    goal, places, players = np.split(vector, [2, 2 + 2 * len(landmarks)])
    color, colors = 0.25 + 0.5 * landmarks[:, 4], [0.1, 0.9, 0.1, 0.1, 0.1, 0.9]
    return np.concatenate([velocity, goal, [0.25], color, places, colors, players])


def world_comm(kind, by_type):
    fixed = [by_type[name] for name in ("obstacle", "food", "forest")]
    velocity = -by_type["obstacle"][0, 2:4]
    players = [by_type[name] for name in ("leadadversary", "adversary", "agent")]
    positions = np.concatenate([player[:, :2] for player in players])
    assert not np.concatenate(players[:2])[:, 2:4].any()
    prey = by_type["agent"]
    hidden = ~prey[:, :2].any(1, keepdims=True)
    velocities = np.where(hidden, 0, prey[:, 2:4] + velocity)
    forests = by_type["forest"][:, 4]
    head = [velocity, by_type["self"][0, 5:7]]
    head += [part[:, :2].ravel() for part in fixed] + [positions.ravel()]
    if kind == "agent":
        return np.concatenate([*head, forests, velocities.ravel()])
    leader = by_type["self" if kind == "leadadversary" else "leadadversary"]
    return np.concatenate([*head, velocities.ravel(), forests, leader[0, 7:]])


VECTORS = {
    "simple_speaker_listener": speaker_listener,
    "simple_reference": reference,
    "simple_adversary": adversary,
    "simple_push": push,
    "simple_world_comm": world_comm,
}


@pytest.mark.parametrize("name", sorted({*VERSIONS} - {"simple_tag"}))
def test_starts_are_distributed_as_in_mpe2(name):
    env = particles(name, 4000)
    still = 0.9 if name == "simple_world_comm" else 1.0
    agents = sum(group.num_agents for group in env.groups.values())
    assert env.state[..., 2:].abs().max() == 0
    for places, side in ((env.state[:, :agents], 1.0), (env.state[:, agents:], still)):
        assert 0.999 * side < places[..., :2].abs().max() <= side
        assert places[..., :2].mean().abs() < 0.02
        assert places[..., :2].var() == pytest.approx(side**2 / 3, rel=0.03)
    if name == "simple_spread":
        return
    env.words.fill_(1)
    env.reset()
    assert not env.words.any()
    if env.num_goals:
        # Each landmark is equally probable.
        number = len(env.entities) - agents
        share = torch.bincount(env.goal.flatten(), minlength=number) / env.goal.numel()
        np.testing.assert_allclose(share, 1 / number, atol=0.03)


@pytest.mark.parametrize("name", sorted({*VERSIONS} - {"simple_tag"}))
def test_copies_continue_identically(name):
    env, rng, order = particles(name, 3), np.random.default_rng(0), [2, 0, 1]
    env.step({k: torch.from_numpy(v) for k, v in sample(env, rng).items()})
    copy = env.select(torch.tensor(order))
    actions = {k: torch.from_numpy(v) for k, v in sample(env, rng).items()}
    env.step(actions)
    copy.step({k: v[order] for k, v in actions.items()})
    for kind, tokens in env.observe().items():
        assert (copy.observe()[kind].features == tokens.features[order]).all()


@pytest.mark.parametrize(
    ("name", "options", "group", "expected", "error"),
    [
        # Measured on mpe2 with 300 episodes (standard error 0.5) and 3000.
        ("simple_spread", {}, "agent", -26.5, 1.5),
        ("simple_spread", {"continuous_actions": True}, "agent", -24.8, 1.5),
        ("simple_speaker_listener", {}, "listener", -39.8, 3),
    ],
)
def test_random_policy_returns_match_mpe2(name, options, group, expected, error):
    roles = ("agent", "speaker", "listener")
    returns = mean_returns(name, 2000, random=roles, seed=1, **options)
    assert returns[group] == pytest.approx(expected, abs=error)
