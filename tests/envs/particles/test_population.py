"""Entities that arrive and leave: lives, forces, tokens, rewards, views, pictures."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.particles import no_op, particles
from helpers.tables import yaml_cases
from marl_pool.envs import make_batched_env, make_env
from marl_pool.envs.checks import check_env
from marl_pool.envs.particles.physics import ParticleEnv
from marl_pool.envs.particles.population import NEVER, PLACES, between
from marl_pool.evaluation.cases import play
from marl_pool.policies import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

Rules = list[dict[str, Any]]
COMING: Rules = [
    {"type": "agent", "count": [0, 3], "step": [3, 9]},
    {"step": 4, "where": "disc", "radius": 0.5},
    {"type": "landmark", "count": 2, "step": 5, "where": "square", "radius": 0.2},
]
GOING: Rules = [
    {"type": "landmark", "count": [1, 2], "step": [2, 8]},
    {"count": 1, "step": 6},
    {"count": 1, "step": 7},
]
LANDMARKS: Rules = [
    {"type": "landmark", "step": 3},
    {"type": "landmark", "count": 2, "step": 4},
]
MPEV2 = [
    f"mpev2_{task}" for task in ("spread", "tag", "guard", "adversary", "repel", "hunt")
]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "spread": ("simple_spread", {"arrivals": COMING, "departures": GOING}),
    "centroid": (
        "simple_centroid",
        {
            "num_agents": 2,
            "arrivals": [{"step": 3, "count": 2}, {"type": "signal", "step": 2}],
            "departures": [
                {"type": "noise", "count": 28, "step": [2, 8]},
                {"type": "signal", "count": 2, "step": 4},
            ],
        },
    ),
    "fleeing prey": (
        "simple_tag",
        {
            "prey": "flee",
            "arrivals": [{"step": 3}, {"type": "obstacle", "step": 1}],
            "departures": [{"type": "prey", "count": [1, 2], "step": 2}],
        },
    ),
    "learning prey": (
        "simple_tag",
        {
            "prey": "learned",
            "obstacles_collide": True,
            "arrivals": [{"type": "prey", "count": 2, "step": [1, 9]}],
            "departures": [{"type": "prey", "count": 2, "step": [1, 9]}],
        },
    ),
    "adversary": (
        "simple_adversary",
        {
            "num_agents": 3,
            "arrivals": [
                *({"step": [2, 5], "count": 2}, {"type": "adversary", "step": 3}),
                {"type": "landmark", "step": 2},
            ],
            "departures": [
                {"step": [2, 8], "count": 2},
                {"type": "landmark", "count": 2, "step": 4},
            ],
        },
    ),
    "push": (
        "simple_push",
        {
            "arrivals": [{"step": 2, "count": 2}, {"type": "adversary", "step": 3}],
            "departures": [{"type": "landmark", "step": 4}],
        },
    ),
    "world_comm": (
        "simple_world_comm",
        {
            "arrivals": [
                {"type": kind, "step": [2, 5]}
                for kind in ("agent", "adversary", "food", "forest", "obstacle")
            ],
            "departures": [
                {"type": kind, "step": 4}
                for kind in ("agent", "adversary", "food", "forest")
            ],
        },
    ),
    **{
        name: (name, {"arrivals": LANDMARKS[:1], "departures": LANDMARKS[1:]})
        for name in ("simple_reference", "simple_speaker_listener")
    },
    **{
        name: (
            name,
            {
                "domain": 2,
                "margin": 0,
                "arrivals": [{"step": [2, 5], "count": 2}],
                "departures": [{"step": [2, 5], "count": 2}],
            },
        )
        for name in MPEV2
    },
    **{f"{name} in training": (name, {}) for name in MPEV2},
    "all that may leave": (
        "mpev2_adversary",
        {
            "departures": [
                {"type": kind, "step": 1}
                for kind in ("agent", "adversary", "target", "decoy")
            ]
        },
    ),
}


def spread(num_envs: int, **options: Any) -> Any:
    return particles("simple_spread", num_envs, **{"max_steps": 20, **options})


@pytest.mark.parametrize("variant", VARIANTS)
def test_population_keeps_the_env_contract(variant, monkeypatch):
    monkeypatch.setattr("marl_pool.envs.checks.STEPS", 12)  # beyond an episode
    name, options = VARIANTS[variant]
    assert not any(check_env(name, max_steps=10, **options).values())


def test_starts_equal_those_without_arrivals_and_departures():
    env = spread(50, seed=3, arrivals=COMING, departures=GOING)
    plain = spread(50, seed=3)
    # Agents have slots 0 to 2, then four for newcomers; landmarks the next three.
    torch.testing.assert_close(env.state[:, [0, 1, 2, 7, 8, 9]], plain.state)
    there = torch.tensor([1, 1, 1, *[0] * 4, 1, 1, 1, 0, 0]) > 0
    assert (env.present == there).all()


def test_arrivals_and_departures_follow_the_rules():
    env = spread(3000, arrivals=COMING, departures=GOING)
    begins, ends = env.lives.unbind(-1)
    number = (begins[:, 3:6] < NEVER).sum(1)
    assert sorted(number.unique().tolist()) == [0, 1, 2, 3]
    assert number.bincount().min() > 650  # 750 each; the deviation is 24
    steps = begins[:, 3:6][begins[:, 3:6] < NEVER]
    assert steps.unique().tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert (begins[:, 6] == 4).all()
    assert (begins[:, 10:] == 5).all()
    # One agent leaves at step 6, another one at step 7, each as often as the others.
    leaving = ends[:, :3]
    assert (leaving.sort(1).values == torch.tensor([6, 7, NEVER])).all()
    assert (leaving == 6).sum(0).min() > 900  # 1000 each; the deviation is 26
    gone = (ends[:, 7:10] < NEVER).sum(1)
    assert sorted(gone.unique().tolist()) == [1, 2]
    assert (ends[:, 3:7] == NEVER).all()
    # The disc, the square, and the edge of nine tenths of the picture.
    assert env.state[:, 6, :2].norm(dim=-1).max() <= 0.5
    assert env.state[:, 10:, :2].abs().max() <= 0.2
    edge = env.state[:, 3:6, :2].abs().amax(-1)
    torch.testing.assert_close(edge, torch.full_like(edge, 0.9 * env.extent))


def test_newcomers_have_no_effect_before_arrival():
    early, late = (
        spread(20, arrivals=[{"count": 2, "step": step}], local_ratio=0.3)
        for step in (5, 12)
    )
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        choices = torch.from_numpy(rng.integers(0, 5, (20, 5)))
        first, second = (
            e.step({"agent": choices}).rewards["agent"] for e in (early, late)
        )
        # The step of arrival earns what the old set earns.
        assert torch.equal(first[:, :3], second[:, :3]) == (step <= 5)
        if step <= 5:
            assert torch.equal(early.state[:, :3], late.state[:, :3])


def test_absent_agents_neither_earn_nor_push_nor_are_seen():
    env = spread(
        1, num_agents=2, arrivals=[{"step": 3, "where": "disc", "radius": 0.1}]
    )
    env.state[0, :3, :2] = 0.01 * torch.arange(6).view(3, 2)
    env.state[0, 0, :2] = 1.0
    before = env.state.clone()
    for step in range(3):
        tokens = env.observe()["agent"]
        assert tokens.padding[0].sum(1).tolist() == [1, 1, 5]
        assert env.active["agent"].tolist() == [[True, True, False]]
        rewards = env.step(no_op(env)).rewards["agent"]
        assert rewards[0, 2] == 0
        assert torch.equal(env.state, before), step
    assert env.active["agent"].all()
    assert not env.observe()["agent"].padding.any()
    assert env.step(no_op(env)).rewards["agent"][0, 2] < 0
    # The newcomer and its neighbor push each other; the position follows later.
    assert (env.state[0, 1:3, 2:].norm(dim=-1) > 0.5).all()


def test_rewards_count_only_present_entities():
    # By hand: agents at 0 and 3 on a line, a landmark at 1 and one at 10 that comes.
    env = spread(
        1,
        num_agents=2,
        num_landmarks=1,
        local_ratio=0.0,
        arrivals=[{"type": "landmark", "step": 2}],
        departures=[{"step": 3}],
    )
    env.state[0, :, 0] = torch.tensor([0.0, 3.0, 1.0, 10.0])
    env.state[0, :, 1] = 0
    leaver = int(env.lives[0, :2, 1].argmin())
    last = [-11, 0] if leaver == 1 else [0, -9]
    expected = [[-1, -1], [-1, -1], [-8, -8], last]
    for row in expected:
        assert env.step(no_op(env)).rewards["agent"].tolist() == [row]


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**31))
def test_ranges_include_both_ends(low, width, seed):
    numbers = torch.rand(200, generator=torch.Generator().manual_seed(seed))
    picked = between(numbers, low, low + width)
    assert picked.min() >= low
    assert picked.max() <= low + width
    ends = between(torch.tensor([1e-9, 1.0]), low, low + width)
    assert ends.tolist() == [low, low + width]


@pytest.mark.parametrize(
    ("where", "mean_square"), [("edge", 4 / 3), ("square", 2 / 3), ("disc", 1 / 2)]
)
def test_places_are_uniform(where, mean_square):
    # Integrals of x² + y² over the edge, the square and the disc.
    points = PLACES[where](torch.rand(40_000, 2, dtype=torch.float64))
    assert points.mean(0).abs().max() < 0.02
    assert float(points.square().sum(-1).mean()) == pytest.approx(mean_square, rel=0.02)


def test_pettingzoo_agents_come_and_go():
    env = make_env(
        "simple_spread",
        num_agents=2,
        max_steps=9,
        seed=1,
        arrivals=[{"step": 2}],
        departures=[{"step": 4}],
    )
    env.reset()
    numbers = []
    while env.agents:
        numbers.append(len(env.agents))
        acting = set(env.agents)
        _, rewards, ended, _, _ = env.step(dict.fromkeys(env.agents, 0))
        assert acting <= set(rewards)
        assert {agent for agent in rewards if ended[agent]} == acting - set(
            env.agents if len(numbers) < 9 else acting
        )
    assert numbers == [2, 2, 3, 3, 2, 2, 2, 2, 2]


def test_frames_show_only_present_entities():
    env = spread(
        1, num_agents=1, num_landmarks=1, arrivals=[{"step": 1, "where": "square"}]
    )
    env.state[0, :, :2] = torch.tensor([[-1.0, 1.0], [1.0, 1.0], [0.0, -1.0]])
    frames = [env.frame(size=150)]
    env.step(no_op(env))
    frames.append(env.frame(size=150))
    changed = (frames[0] != frames[1]).any(-1)
    # Only around the newcomer, in the upper right.
    assert changed[:60, 90:].sum() > 100
    changed[:60, 90:] = False
    assert not changed.any()


def test_means_are_over_agents_that_came():
    rules: Rules = [{"count": [0, 6], "step": [10, 15]}]
    env = spread(64, arrivals=rules)
    policy = RandomPolicy(env.groups["agent"].action_space)
    episodes = Rollout(env, {"agent": policy}).episodes()
    came = env.lives[:, : env.groups["agent"].num_agents, 0] < NEVER
    assert (episodes.attended["agent"] == came).all()
    assert came.sum(1).unique().tolist() == [3, 4, 5, 6, 7, 8, 9]
    for returns, mask, mean in zip(
        episodes.returns["agent"], came, episodes.means()["agent"], strict=True
    ):
        assert mean == pytest.approx(float(returns[mask].mean()), abs=1e-12)
    # `evaluate` reports these.
    env = spread(64, arrivals=rules)
    torch.testing.assert_close(
        torch.from_numpy(play({"agent": policy}, env).returns["agent"]),
        episodes.means()["agent"],
    )


def test_attendance_is_reset_with_each_episode():
    # The newcomer arrives in about every second episode, and leaves.
    rules: Rules = [{"count": [0, 1], "step": 4}]
    env = spread(8, arrivals=rules, max_steps=6)
    rollout = Rollout(env, {"agent": RandomPolicy(env.groups["agent"].action_space)})
    came = []
    for _ in range(5):
        came.append(env.lives[:, 3, 0] < NEVER)
        rollout.steps(6)
    finished = rollout.pop_finished()
    attended = torch.stack([part.attended["agent"][:, 3] for part in finished])
    assert (attended == torch.stack(came)).all()
    assert 0 < attended.float().mean() < 1


@yaml_cases("option, rules, message")
def test_rules_are_refused_by_their_key(option, rules, message):
    with pytest.raises(InputError, match=message):
        spread(1, **{option: rules})


def test_all_noise_entities_may_leave():
    rules: Rules = [{"type": "noise", "count": 28, "step": 1}]
    env = make_batched_env("simple_centroid", 2, departures=rules)
    env.reset()
    assert env.signal()["agent"].sum() == 2 * 4
    with pytest.raises(
        InputError, match="at most 28 of 28 of type 'noise' to leave, got"
    ):
        make_batched_env("simple_centroid", 2, departures=rules + rules)


CHANGING = {
    "simple_adversary": {"agent": ("num_agents", 3), "landmark": ("num_landmarks", 3)},
    "simple_push": {"landmark": ("num_landmarks", 3), "agent": (), "adversary": ()},
    "simple_world_comm": {
        "agent": ("num_agents", 2),
        "adversary": ("num_adversaries", 3),
        "food": ("num_food", 2),
        "forest": ("num_forests", 2),
    },
}
"""Kinds that arrive and leave, with the option for the number of each."""


def play_both(env: ParticleEnv, small: ParticleEnv, where: torch.Tensor) -> None:
    """Compare a step of two environments, one of which has more entities.

    ``where`` are the entities of the large one that the small one has.
    """
    small.state.copy_(env.state[:, where])
    rng = np.random.default_rng(0)
    present = {
        name: where[(places.start <= where) & (where < places.stop)] - places.start
        for name, places in env._slices.items()
    }
    choices = {
        name: torch.from_numpy(rng.integers(0, 5, (env.num_envs, group.num_agents)))
        for name, group in env.groups.items()
    }
    fewer = {name: choices[name][:, present[name]] for name in small.groups}
    large = env.observe()
    for name, tokens in small.observe().items():
        for number, agent in enumerate(present[name].tolist()):
            visible = ~large[name].padding[:, agent]
            features = large[name].features[:, agent][visible]
            assert torch.equal(features, tokens.features[:, number].flatten(0, 1))
    rewards = env.step(choices).rewards
    for name, expected in small.step(fewer).rewards.items():
        reward = rewards[name]
        assert reward.isfinite().all()
        torch.testing.assert_close(reward[:, present[name]], expected)
        gone = torch.ones(reward.shape[1], dtype=torch.bool)
        gone[present[name]] = False
        assert (reward[:, gone] == 0).all()
    torch.testing.assert_close(env.state[:, where], small.state)


@pytest.mark.parametrize("name", CHANGING)
def test_absent_entities_have_no_effect(name):
    numbers = dict(filter(None, CHANGING[name].values()))
    rules: Rules = [{"type": kind, "step": 9} for kind in CHANGING[name]]
    env = particles(name, 4, arrivals=rules, **numbers)
    small = particles(name, 4, **numbers)
    for part in set(small.state_names) - {"state"}:
        assert torch.equal(getattr(small, part), getattr(env, part))
    where = env.present[0].nonzero()[:, 0]
    assert len(where) == len(small.entities)
    for _ in range(3):
        play_both(env, small, where)


@pytest.mark.parametrize("name", ["simple_adversary", "simple_world_comm"])
def test_departed_entities_have_no_effect(name):
    numbers = dict(CHANGING[name].values())
    rules: Rules = [{"type": kind, "step": 1} for kind in CHANGING[name]]
    for seed in range(4):
        env = particles(name, 1, departures=rules, seed=seed, **numbers)
        env.step(no_op(env))
        where = env.present[0].nonzero()[:, 0]
        small = particles(name, 1, **{k: n - 1 for k, n in numbers.items()})
        if len(where) > len(small.entities):  # the landmark that would leave is a goal
            small = particles(name, 1, num_agents=2, num_landmarks=3)
        if hasattr(env, "goal") and env.num_goals:
            first = env._slices["landmark"].start
            goal = (where == first + env.goal[0]).nonzero()[:, 0]
            small.goal[0] = goal - small._slices["landmark"].start
        small.words.copy_(env.words)
        for _ in range(2):
            play_both(env, small, where)


@pytest.mark.parametrize(
    "name", ["simple_reference", "simple_speaker_listener", "simple_adversary"]
)
def test_goal_landmarks_never_leave(name):
    options = {"num_landmarks": 3, "departures": LANDMARKS[1:]}
    env = particles(name, 200, max_steps=9, **options)
    places = env.goal_places().clone()
    for _ in range(6):
        env.step(no_op(env))
    landmarks = env.present[:, env._slices["landmark"]]
    assert landmarks.gather(1, env.goal).all()
    assert torch.equal(env.goal_places(), places)
    # Two of three leave, except goals.
    assert (landmarks.sum(1) == 1).any()
    assert (landmarks.sum(1) >= 1).all()


def test_landmarks_that_arrive_have_no_identity():
    for name in ("simple_reference", "simple_speaker_listener"):
        env = particles(name, 3, arrivals=[{"type": "landmark", "step": 1}])
        env.step(no_op(env))
        group = "agent" if name == "simple_reference" else "listener"
        tokens = env.observe()[group]
        is_landmark = tokens.types == env.type_names.index("landmark")
        marks = tokens.features[..., 4:7][is_landmark].view(-1, 4, 3)
        expected = torch.cat((torch.eye(3), torch.zeros(1, 3))).double()
        assert torch.equal(marks, expected.expand_as(marks))
        assert (env.goal < 3).all()


each_start = pytest.mark.parametrize(
    "name", ["mpev2_spread", "mpev2_guard", "mpev2_adversary"]
)
"""Tasks in which all starts, the starts of a kind, or none keep apart."""


@each_start
def test_rules_come_beside_the_tasks_own_arrivals(name):
    options = {"max_steps": 40, "seed": 3}
    plain = particles(name, 100, **options)
    rules: Rules = [{"count": 2, "step": [5, 9]}]
    env = particles(name, 100, arrivals=rules, **options)
    agents = plain._slices["agent"].stop
    slots = [i for i in range(len(env.entities)) if not agents <= i < agents + 2]
    torch.testing.assert_close(env.state[:, slots], plain.state)
    assert torch.equal(env.lives[:, slots], plain.lives)
    begins = env.lives[:, agents : agents + 2, 0]
    assert begins.unique().tolist() == [5, 6, 7, 8, 9]


@each_start
def test_first_agent_never_leaves(name):
    env = particles(name, 200, max_steps=40, departures=[{"count": 2, "step": [1, 5]}])
    started = (env.lives[..., 0] == 0)[:, env._slices["agent"]].sum(1)
    leavers = ((env.lives[..., 1] < NEVER) & (env.lives[..., 0] == 0)).sum(1)
    assert torch.equal(leavers, (started - 1).clamp(max=2))
    assert started.unique().tolist() == [1, 2, 3]
    late = env.lives[..., 0] > 0
    assert (env.lives[..., 1][late & (env.lives[..., 0] < NEVER)] == NEVER).all()
    for _ in range(8):
        rewards = env.step(no_op(env)).rewards["agent"]
        assert rewards.isfinite().all()
        assert env.active["agent"][:, 0].all()


def test_a_target_that_has_left_has_no_goal():
    rule = {"type": "target", "step": 5}
    env = particles("mpev2_guard", 50, departures=[rule])
    targets = env._slices["target"]
    for step in range(8):
        env.step(no_op(env))
        first = env.state[:, targets.start, None, :2]
        marked = (env.goals() != first).any(-1)
        assert not (marked & ~env.present[:, targets]).any()
        assert (marked.sum(1) == 2).any() == (step < 4)


@yaml_cases("name, option, rule, message")
def test_rules_that_a_task_cannot_have_are_refused(name, option, rule, message):
    with pytest.raises(InputError, match=rf"^env\.{option}{message}"):
        make_batched_env(name, 1, **{option: [rule]})
