"""MPE's other tasks: mpe2 as the oracle of steps, rewards, observations and starts."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.particles.speaking import SpeakingEnv
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout

VERSIONS = {
    "simple_speaker_listener": 4,
    "simple_reference": 3,
    "simple_adversary": 3,
    "simple_push": 3,
    "simple_world_comm": 3,
}
CASES = [
    *((name, {}, {}) for name in VERSIONS),
    ("simple_adversary", {"num_agents": 4}, {"N": 4}),
    ("simple_reference", {"local_ratio": 0.2}, {"local_ratio": 0.2}),
    (
        "simple_world_comm",
        {"num_agents": 3, "num_adversaries": 2, "num_food": 3, "num_forests": 1},
        {"num_good": 3, "num_adversaries": 3, "num_food": 3, "num_forests": 1},
    ),
]
# mpe2's landmarks that differ for an agent, by their colours.
COLORED = {"simple_speaker_listener", "simple_reference"}


def build(name: str, num_envs: int, **options: Any) -> SpeakingEnv:
    env = make_batched_env(
        name, num_envs, dtype=torch.float64, max_steps=1000, **options
    )
    assert isinstance(env, SpeakingEnv)
    return env


class Oracle:
    """mpe2's env, from the state of environment ``row``."""

    def __init__(self, name: str, env: SpeakingEnv, row: int, **options: Any) -> None:
        module = importlib.import_module(f"mpe2.{name}_v{VERSIONS[name]}")
        self.env = module.raw_env(max_cycles=10_000, **options)
        self.env.reset(seed=0)
        self.world = self.env.unwrapped.world
        # Both list an agent's kind and number.
        kinds = {kind: iter(range(s.start, s.stop)) for kind, s in env._slices.items()}
        landmarks = [
            k for k in ("landmark", "obstacle", "food", "forest") if k in kinds
        ]
        self.rows = [
            next(kinds[agent.name.split("_")[0]]) for agent in self.world.agents
        ]
        self.rows += [i for kind in landmarks for i in kinds[kind]]
        state = env.state[row].numpy()
        for entity, index in zip(self.world.entities, self.rows, strict=True):
            entity.state.p_pos = state[index, :2].copy()
            entity.state.p_vel = state[index, 2:].copy()
        # Goals, with the colours of goals that reset_world gives.
        for agent, number in zip(
            self.world.agents, self._goals(env, row), strict=False
        ):
            goal = self.world.landmarks[number]
            if name in COLORED:
                agent.goal_b = goal
            else:
                agent.goal_a = goal
            if name == "simple_push" and not agent.adversary:
                agent.color = np.full(3, 0.25)
                agent.color[number + 1] += 0.5

    def _goals(self, env: SpeakingEnv, row: int) -> list[int]:
        goals = env.goal[row].tolist()
        shared = len(goals) == 1 and hasattr(self.world.agents[0], "adversary")
        return goals * len(self.world.agents) if shared else goals

    def step(self, actions: dict[str, Any]) -> dict[str, float]:
        for agent in self.env.agents:
            self.env.step(actions[agent])
        return dict(self.env.rewards)

    def observation(self, agent: Any) -> np.ndarray:
        return self.env.unwrapped.scenario.observation(agent, self.world)


def names(env: SpeakingEnv, oracle: Oracle) -> dict[str, tuple[str, int]]:
    """Group and index of mpe2's agents; it numbers the adversaries from 0."""
    counts: dict[str, int] = {}
    result = {}
    for agent in oracle.world.agents:
        kind = agent.name.split("_")[0]
        result[agent.name] = kind, counts.setdefault(kind, 0)
        counts[kind] += 1
    return result


def sample(env: SpeakingEnv, rng: np.random.Generator) -> dict[str, np.ndarray]:
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
def test_every_step_agrees_with_mpe2(name, options, mpe2_options, continuous):
    env = build(name, 2, continuous_actions=continuous, **options)
    env.reset()
    rng = np.random.default_rng(3)
    env.state[..., :2] *= 0.6  # close together: they touch
    oracles = [
        Oracle(
            name, env, row, continuous_actions=continuous, **_counts(name, mpe2_options)
        )
        for row in range(2)
    ]
    for _ in range(30):
        actions = sample(env, rng)
        rewards = env.step({k: torch.from_numpy(v) for k, v in actions.items()}).rewards
        observations = env.observe()
        for row, oracle in enumerate(oracles):
            places = names(env, oracle)
            expected = oracle.step(
                {agent: actions[k][row, i] for agent, (k, i) in places.items()}
            )
            assert env.groups.keys() == {kind for kind, _ in places.values()}
            state = [
                [*entity.state.p_pos, *entity.state.p_vel]
                for entity in oracle.world.entities
            ]
            np.testing.assert_allclose(
                env.state[row, oracle.rows], state, rtol=0, atol=1e-9
            )
            for agent in oracle.world.agents:
                kind, index = places[agent.name]
                reward = float(rewards[kind][row, index])
                assert reward == pytest.approx(expected[agent.name], abs=1e-9)
                tokens = observations[kind].features[row, index].numpy()
                types = observations[kind].types[row, index].tolist()
                vector = VECTORS[name](env, kind, tokens, types)
                expected_vector = oracle.observation(agent)
                np.testing.assert_allclose(vector, expected_vector, rtol=0, atol=1e-9)


def _counts(name: str, options: dict[str, int]) -> dict[str, int]:
    if name == "simple_world_comm" and options:
        return {"num_good": 3, "num_adversaries": 3, "num_obstacles": 1} | options
    return options


def parts(env: SpeakingEnv, kind: str, tokens: np.ndarray, types: list[int]):
    """The tokens of each type, by its name."""
    type_names = env.groups[kind].tokens.type_names
    return {
        type_name: tokens[[i for i, number in enumerate(types) if number == index]]
        for index, type_name in enumerate(type_names)
    }


def speaker_listener(env, kind, tokens, types):
    by_type = parts(env, kind, tokens, types)
    if kind == "speaker":
        return 0.15 + 0.5 * by_type["self"][0, 4:]
    landmarks = by_type["landmark"]
    assert (landmarks[:, 4:7] == np.eye(3)).all()
    words = by_type["speaker"][0, 7:]
    return np.concatenate([-landmarks[0, 2:4], landmarks[:, :2].ravel(), words])


def reference(env, kind, tokens, types):
    by_type = parts(env, kind, tokens, types)
    landmarks = by_type["landmark"]
    assert (landmarks[:, 4:7] == np.eye(3)).all()
    goal = 0.25 + 0.5 * by_type["self"][0, 4:7]
    words = by_type["agent"][0, 7:]
    return np.concatenate([-landmarks[0, 2:4], landmarks[:, :2].ravel(), goal, words])


def adversary(env, kind, tokens, types):
    by_type = parts(env, kind, tokens, types)
    landmarks = by_type["landmark"]
    others = np.concatenate([by_type["adversary"], by_type["agent"]])
    vectors = [landmarks[:, :2].ravel(), others[:, :2].ravel()]
    if kind == "agent":
        vectors.insert(0, landmarks[landmarks[:, 4] == 1, :2].ravel())
    return np.concatenate(vectors)


def push(env, kind, tokens, types):
    by_type = parts(env, kind, tokens, types)
    landmarks = by_type["landmark"]
    others = np.concatenate([by_type["adversary"], by_type["agent"]])
    vectors = [landmarks[:, :2].ravel(), others[:, :2].ravel()]
    if kind == "agent":
        # The colours of landmarks are constant; the agent's tells the goal.
        is_goal = landmarks[:, 4]
        color = [0.25, *(0.25 + 0.5 * is_goal)]
        colors = [0.1, 0.9, 0.1, 0.1, 0.1, 0.9]
        vectors[1:1] = [np.array(colors)]
        vectors[:0] = [landmarks[is_goal == 1, :2].ravel(), np.array(color)]
    return np.concatenate([-landmarks[0, 2:4], *vectors])


def world_comm(env, kind, tokens, types):
    by_type = parts(env, kind, tokens, types)
    fixed = [by_type[name] for name in ("obstacle", "food", "forest")]
    velocity = -by_type["obstacle"][0, 2:4]
    others = [by_type[name] for name in ("leadadversary", "adversary", "agent")]
    positions = np.concatenate([other[:, :2] for other in others])
    assert not np.concatenate(others[:2])[:, 2:4].any()
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


@pytest.mark.parametrize("name", VERSIONS)
def test_starts_are_those_of_mpe2(name):
    env = build(name, 4000)
    env.reset()
    still = 0.9 if name == "simple_world_comm" else 1.0
    agents = sum(group.num_agents for group in env.groups.values())
    assert env.state[..., 2:].abs().max() == 0
    assert env.words.abs().sum() == 0
    for places, side in ((env.state[:, :agents], 1.0), (env.state[:, agents:], still)):
        assert 0.999 * side < places[..., :2].abs().max() <= side
        assert places[..., :2].mean().abs() < 0.02
        assert places[..., :2].var() == pytest.approx(side**2 / 3, rel=0.03)
    if env.num_goals:
        # Each landmark is equally probable.
        number = len(env.entities) - agents
        share = torch.bincount(env.goal.flatten(), minlength=number) / env.goal.numel()
        np.testing.assert_allclose(share, 1 / number, atol=0.03)


@pytest.mark.parametrize("name", VERSIONS)
def test_a_copy_and_a_restored_env_continue_alike(name):
    env = build(name, 3)
    env.reset()
    rng = np.random.default_rng(0)
    env.step({k: torch.from_numpy(v) for k, v in sample(env, rng).items()})
    copy, restored = env.select(torch.tensor([2, 0, 1])), build(name, 3)
    restored.load_state_dict(env.state_dict())
    actions = {k: torch.from_numpy(v) for k, v in sample(env, rng).items()}
    env.step(actions)
    copy.step({k: v[[2, 0, 1]] for k, v in actions.items()})
    restored.step(actions)
    for kind, tokens in env.observe().items():
        assert (copy.observe()[kind].features == tokens.features[[2, 0, 1]]).all()
        assert (restored.observe()[kind].features == tokens.features).all()


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    ("name", "group", "least"),
    [
        # An agent of mpe2 that knows the goal has -7.2, one at the centroid -15.3.
        ("simple_speaker_listener", "listener", -10.0),
        ("simple_reference", "agent", -14.0),
        ("simple_adversary", "agent", 0.0),
        ("simple_push", "agent", -14.0),
        # Random predators have 3, and against them random prey -24.
        ("simple_world_comm", "adversary", 12.0),
        ("simple_world_comm", "agent", -20.0),
    ],
)
def test_the_scripts_solve_the_tasks(name, group, least, continuous):
    env = make_batched_env(name, 300, seed=1, continuous_actions=continuous)
    scripts = {
        kind: make_heuristic(name, agents, role=kind)
        for kind, agents in env.groups.items()
    }
    returns = Rollout(env, scripts).episodes().returns[group]
    assert float(returns.mean()) > least


def test_random_actions_get_the_returns_of_mpe2():
    # Measured on mpe2 with 3000 episodes.
    env = make_batched_env("simple_speaker_listener", 2000, seed=1)
    policies = {
        kind: RandomPolicy(group.action_space) for kind, group in env.groups.items()
    }
    returns = Rollout(env, policies).episodes().returns["listener"]
    assert float(returns.mean()) == pytest.approx(-39.8, abs=3)


@pytest.mark.parametrize("continuous", [False, True])
def test_scripts_play_with_fewer_words_than_landmarks(continuous):
    options = {"num_words": 2, "num_landmarks": 5, "continuous_actions": continuous}
    env = make_batched_env("simple_reference", 50, **options)
    script = make_heuristic("simple_reference", env.groups["agent"])
    returns = Rollout(env, {"agent": script}).episodes().returns["agent"]
    assert float(returns.mean()) > -35


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("num_words", [2, 4])
def test_hunters_go_where_the_leader_sees_prey_in_a_forest(num_words, continuous):
    options = {"num_agents": 1, "num_words": num_words}
    options["continuous_actions"] = continuous
    env = build("simple_world_comm", 1, **options)
    scripts = {
        name: make_heuristic("simple_world_comm", group, role=name)
        for name, group in env.groups.items()
    }
    env.reset()
    env.state[..., :2] = -0.9  # predators; the rest is out of the way
    env.state[:, env._slices["agent"], :2] = torch.tensor([0.9, -0.9])
    env.state[:, env._slices["forest"], :2] = torch.tensor([0.9, -0.9])
    for step in range(2):
        tokens = env.observe()
        forces = scripts["adversary"].act(tokens["adversary"]).logits
        # Before the leader has spoken hunters rest; its second word is at the right.
        assert (forces != 0).any() == bool(step)
        leader = scripts["leadadversary"].act(tokens["leadadversary"]).action
        rest = {name: env.groups[name].num_agents for name in ("adversary", "agent")}
        no_op = torch.zeros(1, 1, 5) if continuous else torch.zeros(1, 1).long()
        still = {name: no_op.repeat_interleave(n, 1) for name, n in rest.items()}
        env.step({**still, "leadadversary": leader})
    assert (forces[..., 0] > 1).all()
    assert env.words[0, 0].argmax() == 1


def test_prey_flee_from_what_is_near_and_else_eat():
    env = build("simple_world_comm", 1, num_agents=1, num_food=1)
    script = make_heuristic("simple_world_comm", env.groups["agent"], role="agent")
    env.reset()
    env.state.zero_()
    env.state[:, env._slices["food"], 0] = 0.9
    env.state[:, env._slices["forest"], 1] = 5.0
    env.state[:, env._slices["leadadversary"], 0] = 5.0
    predators = env.state[:, env._slices["adversary"]]
    for place, direction in ((0.3, -1), (5.0, 1)):
        predators[..., 0] = place
        force = script.act(env.observe()["agent"]).logits
        assert (force[..., 0].sign() == direction).all()
