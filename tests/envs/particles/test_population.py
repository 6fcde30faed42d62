"""Entities that arrive and leave: lives, forces, tokens, rewards, views, pictures."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.tables import yaml_cases
from marl_pool.envs import make_batched_env, make_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.checks import check_env
from marl_pool.envs.particles.population import NEVER, PLACES, between
from marl_pool.envs.particles.simple_spread import SimpleSpread
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
}


def spread(num_envs: int, **options: Any) -> SimpleSpread:
    env = make_batched_env("simple_spread", num_envs, **{"max_steps": 20, **options})
    assert isinstance(env, SimpleSpread)
    env.reset()
    return env


def rest(env: BatchedEnv) -> dict[str, torch.Tensor]:
    shape = env.num_envs, env.groups["agent"].num_agents
    return {"agent": torch.zeros(shape, dtype=torch.int64)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_contract_is_kept(variant):
    name, options = VARIANTS[variant]
    assert not any(check_env(name, max_steps=20, **options).values())


def test_the_start_is_that_without_them():
    env = spread(50, seed=3, arrivals=COMING, departures=GOING)
    plain = spread(50, seed=3)
    # Agents have slots 0 to 2, then four for newcomers; landmarks the next three.
    torch.testing.assert_close(env.state[:, [0, 1, 2, 7, 8, 9]], plain.state)
    there = torch.tensor([1, 1, 1, *[0] * 4, 1, 1, 1, 0, 0]) > 0
    assert (env.present == there).all()


def test_lives_are_as_the_rules_say():
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


def test_newcomers_change_nothing_before_they_come():
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
        rewards = env.step(rest(env)).rewards["agent"]
        assert rewards[0, 2] == 0
        assert torch.equal(env.state, before), step
    assert env.active["agent"].all()
    assert not env.observe()["agent"].padding.any()
    assert env.step(rest(env)).rewards["agent"][0, 2] < 0
    # The newcomer and its neighbour push each other; the position follows later.
    assert (env.state[0, 1:3, 2:].norm(dim=-1) > 0.5).all()


def test_rewards_count_those_that_are_there():
    # By hand: agents at 0 and 3 on a line, a landmark at 1 and one at 10 that comes.
    rules: Rules = [{"type": "landmark", "step": 2}]
    leave: Rules = [{"step": 3}]
    env = spread(
        *(1,),
        num_agents=2,
        num_landmarks=1,
        local_ratio=0.0,
        arrivals=rules,
        departures=leave,
        dtype=torch.float64,
    )
    env.state[0, :, 0] = torch.tensor([0.0, 3.0, 1.0, 10.0])
    env.state[0, :, 1] = 0
    leaver = int(env.lives[0, :2, 1].argmin())
    expected = [[-1, -1], [-1, -1], [-8, -8], [-10, -10]]
    if leaver == 1:
        expected[3] = [-11, 0]
    else:
        expected[3] = [0, -9]
    for row in expected:
        assert env.step(rest(env)).rewards["agent"].tolist() == [row]


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


def test_pictures_show_those_that_are_there():
    env = spread(
        1, num_agents=1, num_landmarks=1, arrivals=[{"step": 1, "where": "square"}]
    )
    env.state[0, :, :2] = torch.tensor([[-1.0, 1.0], [1.0, 1.0], [0.0, -1.0]])
    frames = [env.frame(size=150)]
    env.step(rest(env))
    frames.append(env.frame(size=150))
    changed = (frames[0] != frames[1]).any(-1)
    # Only around the newcomer, in the upper right.
    assert changed[:60, 90:].sum() > 100
    changed[:60, 90:] = False
    assert not changed.any()


def test_a_rollout_plays_them():
    env = spread(16, arrivals=COMING, departures=GOING)
    policy = RandomPolicy(env.groups["agent"].action_space)
    returns = Rollout(env, {"agent": policy}).episodes().returns["agent"]
    begins = env.lives[:, :7, 0]
    assert ((returns == 0) == (begins == NEVER)).all()


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


def test_attendance_begins_anew_with_each_episode():
    # The newcomer comes in every second episode or so, and leaves.
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


def test_all_that_do_not_matter_may_leave():
    rules: Rules = [{"type": "noise", "count": 28, "step": 1}]
    env = make_batched_env("simple_centroid", 2, departures=rules)
    env.reset()
    assert env.signal()["agent"].sum() == 2 * 4
    with pytest.raises(
        InputError, match="at most 28 of 28 of type 'noise' to leave, got"
    ):
        make_batched_env("simple_centroid", 2, departures=rules + rules)
