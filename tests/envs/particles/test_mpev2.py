"""MPEv2's tasks: vectors of the published code, mpe2's physics, counts, anchors."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from particle_anchors import Rest
from scipy.optimize import linear_sum_assignment

from helpers.particles import mpe2_step, mpe2_world, particles
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.particles.mpev2 import MPEv2, spaced
from marl_pool.envs.particles.mpev2_heuristics import least_pairs
from marl_pool.envs.particles.mpev2_motion import chase, drive, flee
from marl_pool.envs.particles.population import NEVER
from marl_pool.envs.scripted import scripted_policy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

TASKS = ("spread", "tag", "guard", "adversary", "repel", "hunt")
OTHERS = {"spread": "target", "guard": "target", "adversary": "target"}
Points = list[tuple[float, float]]
AGENTS: Points = [(0, 0), (1, 0.5), (-0.5, 2.6)]


def build(task: str, num_envs: int = 1, **options: Any) -> Any:
    return particles(f"mpev2_{task}", num_envs, **options)


def arrange(env: MPEv2, **points: Points) -> MPEv2:
    """Place entities at these points, by kind; all others are absent."""
    env.lives[..., 0] = NEVER
    env.state[:] = 0
    for kind, places in points.items():
        first = env._slices[kind].start
        for slot, place in enumerate(places, first):
            env.state[:, slot, :2] = torch.tensor(place, dtype=torch.float64)
            env.lives[:, slot, 0] = 0
    return env


@pytest.mark.parametrize(
    ("task", "reward"),
    [
        ("spread", -0.418102497),
        ("tag", -4.626527804),
        ("guard", -6.927370494),
        ("adversary", 3.035229911),
        ("repel", -2.248425308),
        ("hunt", -1.057065637),
    ],
)
def test_rewards_are_those_of_the_published_code(task, reward):
    points = {
        "agent": AGENTS,
        OTHERS.get(task, "adversary"): [(0.5, 0.5), (0.06, 0.05)],
    }
    if task == "adversary":
        points["adversary"] = [(-1, -1)]
    env = arrange(build(task), **points)
    assert env.reward().tolist() == pytest.approx([reward], abs=1e-8)


@pytest.mark.parametrize(
    ("task", "script", "place", "velocity", "force"),
    [
        ("tag", chase, (0.5, 0.5), (0.1, -0.05), (0.99983561, 0.01813173)),
        ("repel", chase, (0.5, 0.5), (0.1, -0.05), (0.99983561, 0.01813173)),
        ("hunt", flee, (0.5, 0.5), (0.1, -0.05), (-0.99985709, 0.0169058)),
        ("tag", chase, (1.97, 0.3), (0.5, 0), (-0.98258171, 0.18583106)),
        ("hunt", flee, (1.97, 0.3), (0.5, 0), (-0.27630742, -0.9610693)),
    ],
)
def test_scripts_are_those_of_the_published_code(task, script, place, velocity, force):
    env = arrange(build(task), agent=AGENTS, adversary=[place])
    slot = env._slices["adversary"].start
    env.state[0, slot, 2:] = torch.tensor(velocity)
    assert script(env, "adversary")[0, 0].tolist() == pytest.approx(force, abs=1e-7)


@pytest.mark.parametrize(
    ("goal", "force"),
    [((0.52, 0.48), (0.025, -0.1125)), ((1, 1), (0.68814013, 0.72557781))],
)
def test_targets_drive_to_goals_as_in_the_published_code(goal, force):
    way = torch.tensor(goal, dtype=torch.float64) - 0.5
    pushed = drive(way, torch.tensor([0.1, -0.05], dtype=torch.float64))
    assert pushed.tolist() == pytest.approx(force, abs=1e-7)


@pytest.mark.parametrize(
    ("place", "penalty"),
    [((2.5, 0), -(5**0.5)), ((2.5, 3), -5), ((5, 0), -25), ((2, 0), 0), ((0, -3), -5)],
)
def test_leaving_the_square_costs(place, penalty):
    env = arrange(build("tag"), agent=[place], adversary=[(-9, -9)])
    assert float(env.reward()) == pytest.approx(penalty)
    # The boundary of repel is 2.5, and the formula the same.
    env = arrange(build("repel"), agent=[place], adversary=[(-9, -9)])
    gap = float(np.hypot(place[0] + 9, place[1] + 9)) - 0.1
    beyond = max(map(abs, place)) > 2.5
    assert float(env.reward()) == pytest.approx(gap + penalty * beyond)


@pytest.mark.parametrize(
    ("agents", "targets", "guards"), [(3, 2, 2), (5, 4, 2), (8, 4, 2), (3, 1, 3)]
)
def test_guards_of_a_target_are_rounded_up(agents, targets, guards):
    env = build("guard", domain=1 if agents > 4 else 0)
    places: Points = [(1.0 + number, 0) for number in range(agents)]
    arrange(env, agent=places, target=[(0, 0)] * targets)
    gap = sum(1 + number - 0.1 for number in range(guards))
    assert float(env.reward()) == pytest.approx(-targets * gap)


@pytest.mark.parametrize("task", TASKS)
def test_steps_agree_with_the_physics_of_mpe2(task):
    env = build(task, 4, seed=2)
    env.lives[..., 0] = 0  # all of them, from the start
    rng = np.random.default_rng(0)
    env.state[..., :2] = torch.from_numpy(
        rng.uniform(-0.3, 0.3, env.state[..., :2].shape)
    )
    assert {kind.mass for kind in env.entities} == {2.0}
    worlds = [mpe2_world(env.entities, row) for row in env.state.numpy()]
    forces: list[np.ndarray] = []
    move = env._move
    env._move = lambda force: (forces.append(force.numpy()), move(force))
    for _ in range(60):
        pushes = env.contact_forces().numpy()
        choices = rng.integers(0, 5, (4, env.groups["agent"].num_agents))
        env.step({"agent": torch.from_numpy(choices)})
        controls = forces[-1] - pushes
        states = [mpe2_step(*pair) for pair in zip(worlds, controls, strict=True)]
        np.testing.assert_allclose(env.state, states, rtol=0, atol=1e-9)


COUNTS = {
    # For each domain: lowest and highest numbers at the start, and most arrivals.
    "agent": ((1, 3, 1), (5, 5, 2), (5, 5, 0)),
    "other": ((1, 3, 1), (5, 5, 0), (5, 5, 2)),
}
GUARD = {
    "agent": ((1, 3, 1), (5, 5, 3), (5, 5, 0)),
    "target": ((1, 2, 1), (4, 4, 0), (4, 4, 2)),
}
LANDMARKS = ((1, 2, 1),) * 3
SIDES = {
    "spread": (1.0, 1.0),
    "tag": (0.5, 2.0),
    "guard": (2.0, 1.0),
    "adversary": (1.3, 1.3),
    "repel": (2.5, 0.2),
    "hunt": (2.0, 0.5),
}
"""Half sides of the squares in which agents and the others start."""


@pytest.mark.parametrize("domain", [0, 1, 2])
@pytest.mark.parametrize("task", TASKS)
def test_numbers_and_starts_are_the_published_ones(task, domain):
    env = build(task, 1000, domain=domain)
    for kind in env.kinds:
        if task == "guard":
            expected = GUARD[kind.name]
        elif task == "adversary" and kind.name in ("target", "decoy"):
            expected = LANDMARKS
        else:
            expected = COUNTS["agent" if kind.name == "agent" else "other"]
        low, high, most = expected[domain]
        lives = env.lives[:, env._slices[kind.name], 0]
        numbers = (lives == 0).sum(1)
        assert numbers.unique().tolist() == list(range(low, high + 1))
        share = numbers.bincount()[low:] / len(lives)
        assert (share - 1 / (high + 1 - low)).abs().max() < 0.05
        due = (lives > 0) & (lives < NEVER)
        # In domain 0 one that is due at 0 never comes.
        least = 0 if domain == 0 and most else min(most, 1)
        assert due.sum(1).unique().tolist() == list(range(least, most + 1))
        margin = 10 if domain else 0
        if most:
            assert lives[due].min() == max(margin, 1)
            assert lives[due].max() == env.max_steps - 1 - margin
    if domain != 1:
        return
    agents = env.state[:, :5, :2]
    others = env.state[:, env._slices[OTHERS.get(task, "adversary")], :2][:, :2]
    for places, side in zip((agents, others), SIDES[task], strict=True):
        assert 0.97 * side < places.abs().max() <= side
    if task == "tag":
        assert others[..., 0].max() <= -1.2
        assert others[..., 1].min() >= 1.2
    if task == "hunt":
        assert agents.abs().min() >= 0.5
    apart = torch.cdist(agents, agents) + 9 * torch.eye(5)
    assert (apart.min() > 2 * env.size) == (task != "adversary")


def test_a_disc_takes_its_first_free_place_or_its_last():
    tries = torch.tensor(
        [[[[0.0, 0], [9, 9]], [[0, 0.5], [0, 2]], [[0, 1.5], [0, 0.5]]]]
    )
    places = spaced(tries, torch.ones(1, 3, dtype=torch.bool), 1.0)
    assert places.tolist() == [[[0, 0], [0, 2], [0, 0.5]]]
    unused = torch.tensor([[False, True, True]])
    assert spaced(tries, unused, 1.0)[0, 1].tolist() == [0, 0.5]


def test_goals_are_drawn_every_51_steps_and_newcomers_wait():
    env = build("guard", 200, domain=2, seed=5)
    choices = torch.zeros(200, env.groups["agent"].num_agents, dtype=torch.int64)
    drawn, begins = [], env.lives[:, env._slices["target"], 0]
    goals = env.goal_places
    for step in range(1, 160):
        env.step({"agent": choices})
        if not torch.equal(goals, env.goal_places):
            drawn.append(step)
            goals = env.goal_places
            away = torch.cdist(goals[:, :4], goals[:, :4]) + 9 * torch.eye(4)
            assert away.min() >= 0.2
            assert goals.abs().max() <= 1.95
        if step == 51:
            # Those that came after the first draw have had no goal so far.
            waits = (begins > 1) & (begins < 52)
            assert waits.sum() > 50
            assert not env._has_goal()[waits].any()
    # Drawn at the end of steps 1, 52, …, and used from the next step on.
    assert drawn == [2, 53, 104, 155]


def test_own_token_holds_the_absolute_position():
    env = build("tag", 2, domain=1)
    tokens = env.observe()["agent"]
    assert torch.equal(tokens.features[:, :, 0], env.state[:, :7])
    away = env.state[:, None, 7:] - env.state[:, :7, None]
    assert torch.equal(tokens.features[:, :, 7:], away)
    glyphs = env.glyphs(tokens.at((0, 2)), 0, group="agent", agent=2, size=100)
    assert glyphs.observer is not None
    np.testing.assert_allclose(glyphs.places[0], glyphs.observer)


ANCHORS = """
    spread 0 | -163 ± 17 | -53 ± 14
    tag 0 | -174 ± 43 | -4 ± 1
    tag 2 | -123 ± 6 | -14 ± 3
    guard 1 | -1608 ± 52 | -464 ± 33
    adversary 0 | -30 ± 16 | 87 ± 21
    repel 0 | 53 ± 40 | 508 ± 35
    repel 1 | -220 ± 73 |
    hunt 0 | -664 ± 21 |
    hunt 1 | -552 ± 9 |
    hunt 2 | -547 ± 12 | -104 ± 7
"""
"""Mean returns of uniform choices and of a script in the published code."""


@pytest.mark.slow
@pytest.mark.parametrize("line", ANCHORS.strip().splitlines())
def test_returns_are_those_of_the_published_code(line):
    head, *cells = line.split("|")
    task, domain = head.split()
    for name, cell in zip(("random", "heuristic"), cells, strict=True):
        if not (numbers := re.findall(r"-?\d+", cell)):
            continue
        expected, error = map(float, numbers)
        # Scripts are slow and vary little, beside the published error.
        count = 64 if name == "heuristic" else 200
        env = make_batched_env(f"mpev2_{task}", count, domain=int(domain), margin=10)
        (group,) = env.groups.values()
        policy = scripted_policy(name, env=f"mpev2_{task}", role="agent", group=group)
        returns = Rollout(env, {"agent": policy}).episodes().returns["agent"][:, 0]
        spread = (returns.var().item() / len(returns) + error**2) ** 0.5
        assert float(returns.mean()) == pytest.approx(expected, abs=3 * spread)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_pairs_have_the_least_sum(num_rows, num_columns, seed):
    rng = np.random.default_rng(seed)
    distance = rng.uniform(0, 5, (3, num_rows, num_columns))
    distance[1, 0], distance[2, :, 0] = np.inf, np.inf
    partner = least_pairs(torch.from_numpy(distance)).numpy()
    for costs, columns in zip(distance, partner, strict=True):
        rows = np.flatnonzero(columns >= 0)
        fit = np.where(np.isfinite(costs), costs, 1e6)
        best = linear_sum_assignment(fit)
        pairs = [pair for pair in zip(*best, strict=True) if np.isfinite(costs[pair])]
        assert len(rows) == len(pairs) == len(set(columns[rows]))
        least = sum(costs[pair] for pair in pairs)
        assert costs[rows, columns[rows]].sum() == pytest.approx(least)


@pytest.mark.parametrize("task", TASKS)
def test_scripts_do_better_than_rest(task):
    returns = []
    for is_script in (True, False):
        env = build(task, 2, domain=1, seed=1, max_steps=100)
        script = scripted_policy(
            "heuristic", env=f"mpev2_{task}", role="agent", group=env.groups["agent"]
        )
        rollout = Rollout(env, {"agent": script if is_script else Rest()})
        returns.append(float(rollout.episodes().returns["agent"][:, 0].mean()))
    assert returns[0] > returns[1] + 10


def hunting(**options):
    env = make_batched_env("mpev2_hunt", 6, choices="adversaries", seed=3, **options)
    env.reset()
    return env


def test_agents_that_choose_adversaries_go_their_way_among_the_five_directions():
    selecting = hunting()
    steering = make_batched_env("mpev2_hunt", 6, seed=3)
    steering.reset()
    (script, pilot) = (
        make_heuristic("mpev2_hunt", env.groups["agent"])
        for env in (selecting, steering)
    )
    for _ in range(40):
        tokens = selecting.observe()["agent"]
        choices = script.act(tokens).action
        # The script of directions hunts by the same pairs.
        directions = pilot.act(steering.observe()["agent"]).action
        selecting.step({"agent": choices})
        steering.step({"agent": directions})
        is_present = selecting.active["agent"]
        places, expected = (
            env.state[:, :4][is_present] for env in (selecting, steering)
        )
        torch.testing.assert_close(places, expected)


def test_only_present_adversaries_can_be_selected():
    env = hunting()
    tokens = env.observe()["agent"]
    adversary = tokens.types == 2
    assert env.has_action_masks
    assert env.groups["agent"].tokens.type_names[2] == "adversary"
    assert tokens.action_mask[..., 0].all()
    assert torch.equal(tokens.action_mask[..., 1:], adversary & ~tokens.padding)
    # Selecting nothing or an absent adversary exerts no force.
    absent = (adversary & tokens.padding).byte().argmax(-1) + 1
    for choice in (torch.zeros_like(absent), absent):
        assert not env.agent_forces(choice)[env.active["agent"]].any()


def test_adversaries_are_not_chosen_by_numbers():
    with pytest.raises(InputError, match="continuous_actions: expected false"):
        hunting(continuous_actions=True)
