"""Simple tag: spawns, tokens, rewards, prey, mpe2 as the oracle, golden trajectory.

``python tests/envs/particles/test_simple_tag.py`` writes the golden file anew; a change
in it is a change of the dynamics, which asks for a higher ``SimpleTag.version``.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from mpe2 import simple_tag_v3
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.envs import make_heuristic
from marl_pool.envs.particles.simple_tag import SimpleTag, boundary_penalty, flight
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

GOLDEN = GOLDEN_FILES / "simple_tag.json"
KINDS = ("random", "flee", "learned")
kinds = pytest.mark.parametrize("prey", KINDS)


def actions_for(env: SimpleTag, step: int) -> dict[str, Tensor]:
    """Some actions that depend on environment number, agent and step alone."""
    actions = {}
    for name, group in env.groups.items():
        agents = torch.arange(group.num_agents)
        if isinstance(group.action_space, spaces.Discrete):
            choice = 7 * env.env_ids[:, None] + 3 * agents + step // 3
            actions[name] = (choice % 11) % 5
        else:
            place = env.env_ids[:, None, None] + 3 * agents[:, None] + torch.arange(5)
            actions[name] = torch.sin(7.0 * place.double() + step)
    return actions


def run(env: SimpleTag, steps: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The states and all rewards of ``steps`` steps."""
    states, rewards = [], []
    for step in range(first, first + steps):
        step_rewards = env.step(actions_for(env, step)).rewards
        rewards.append(torch.cat(list(step_rewards.values()), 1))
        states.append(env.state.clone())
    return torch.stack(states), torch.stack(rewards)


def returns(env: SimpleTag, *roles: str | None) -> list[float]:
    """Mean returns of the groups under their heuristics, or random for None."""
    groups = env.groups
    policies: dict[str, Policy] = {
        name: make_heuristic("simple_tag", group, role=role)
        if role
        else RandomPolicy(group.action_space)
        for (name, group), role in zip(groups.items(), roles, strict=True)
    }
    totals = Rollout(env, policies).episodes().returns
    return [float(total.mean()) for total in totals.values()]


# Names and options


@pytest.mark.parametrize("role", [None, "agent"])
def test_a_heuristic_has_a_role(role):
    group = SimpleTag(1).groups["predator"]
    message = f"unknown role of heuristic 'simple_tag': {role!r}: choose from predator,"
    with pytest.raises(InputError, match=message):
        make_heuristic("simple_tag", group, role=role)


# Starts


@pytest.mark.parametrize(
    ("counts", "widest", "obstacles"),
    [
        ("1-3-28", 1.0, math.log(28, 4)),
        ("1-3-4", 1.0, 2.0),
        ("9-7-64", 2.0, 3.0),
        ("1-1-1", 0.5, 2.0),
    ],
)
def test_starts_lie_where_the_published_env_puts_them(counts, widest, obstacles):
    env = SimpleTag(6000, counts=counts)
    env.reset()
    moving, still = env.num_movable, env.state[:, env.num_movable :]
    assert still[..., 2:].abs().max() == 0
    assert obstacles * 0.99 < still[..., :2].abs().max() <= obstacles
    assert still[..., :2].var() == pytest.approx(obstacles**2 / 3, rel=0.05)
    velocity = env.state[:, :moving, 2:]
    assert 0.499 < velocity.abs().max() <= 0.5
    assert velocity.var() == pytest.approx(0.5**2 / 3, rel=0.05)
    # One square for each environment, of half side U(0.1, widest).
    position = env.state[:, :moving, :2]
    assert widest * 0.95 < position.abs().max() <= widest
    assert position.mean().abs() < 0.02
    second = (widest**3 - 0.1**3) / (widest - 0.1) / 3
    assert position.var() == pytest.approx(second / 3, rel=0.06)
    if moving == 16:
        # Maximum of 32 coordinates of a environment: close to its own half side.
        half = position.flatten(1).abs().amax(1) * 33 / 32
        assert half.mean() == pytest.approx((widest + 0.1) / 2, rel=0.03)
        assert half.std() == pytest.approx((widest - 0.1) / math.sqrt(12), rel=0.05)


def test_spread_of_the_obstacles_can_be_set():
    env = SimpleTag(500, obstacle_spread=0.9)
    env.reset()
    assert 0.89 < env.state[:, 4:, :2].abs().max() <= 0.9


# Tokens


def test_tokens_are_relative_and_in_the_published_order():
    env = SimpleTag(3, counts="2-3-2", prey="learned", dtype=torch.float64)
    env.reset()
    run(env, 5)
    orders = {  # predators 0 and 1, prey 2 to 4, obstacles 5 and 6
        "predator": [[0, 5, 6, 1, 2, 3, 4], [1, 5, 6, 0, 2, 3, 4]],
        "prey": [[2, 5, 6, 0, 1, 3, 4], [3, 5, 6, 0, 1, 2, 4], [4, 5, 6, 0, 1, 2, 3]],
    }
    types = {"predator": [0, 1, 1, 2, 3, 3, 3], "prey": [0, 1, 1, 2, 2, 3, 3]}
    state, observations = env.state.numpy(), env.observe()
    assert list(observations) == ["predator", "prey"]
    for name, tokens in observations.items():
        assert tokens.types.tolist() == [[types[name]] * len(orders[name])] * 3
        assert not tokens.padding.any()
        assert env.token_entities(name).tolist() == orders[name]
        mask = [kind != 1 for kind in types[name]]
        assert env.signal()[name].tolist() == [[mask] * len(orders[name])] * 3
        for agent, order in enumerate(orders[name]):
            expected = state[:, order] - state[:, [order[0]]]
            np.testing.assert_array_equal(tokens.features[:, agent], expected)


# Rewards


def env_at(positions: list[list[float]], **options: Any) -> SimpleTag:
    """A environment whose entities rest at these places; they stay for a step."""
    env = SimpleTag(1, dtype=torch.float64, **options)
    env.reset()
    env.state.zero_()
    env.state[0, :, :2] = torch.tensor(positions, dtype=torch.float64)
    return env


@pytest.mark.parametrize("shared", [False, True])
def test_predators_are_rewarded_for_the_prey_that_they_touch(shared):
    # Touching is a distance of at most 0.125, here along x; prey 2 is far away.
    places = [[0.0, 0.0], [0.24, 0.0], [0.0, -0.9], [0.125, 0.0], [0.0, 0.1], [9, 9]]
    env = env_at(places, counts="3-3-0", prey="learned", shared_reward=shared)
    rewards = env.step(actions_for(env, 0) | noop(env)).rewards
    expected = [30.0] * 3 if shared else [20.0, 10.0, 0.0]
    assert rewards["predator"].tolist() == [expected]
    touched = torch.tensor([[20.0, 10.0, 0.0]], dtype=torch.float64)
    away = boundary_penalty(env.state[:, 3:, :2])
    torch.testing.assert_close(rewards["prey"], -touched - away)
    assert away[0].tolist() == [0.0, 0.0, 20.0]


def noop(env: SimpleTag) -> dict[str, Tensor]:
    """No-op for everyone."""
    return {
        name: torch.zeros(env.num_envs, group.num_agents, dtype=torch.int64)
        for name, group in env.groups.items()
    }


@pytest.mark.parametrize(
    ("distance", "reward"), [(0.1249, 10.0), (0.125, 10.0), (0.1251, 0.0)]
)
def test_touching_ends_at_the_sum_of_the_sizes(distance, reward):
    env = env_at([[0.0, 0.0], [distance, 0.0]], counts="1-1-0", prey="flee")
    assert env.step(noop(env)).rewards["predator"].tolist() == [[reward]]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((0.0, 0.9), 0.0),
        ((0.95, 0.0), 0.5),
        ((-0.95, 0.97), 0.5 + 0.7),
        ((1.0, 0.0), 1.0),
        ((0.5, -1.5), math.e),
        ((2.0, 3.0), math.e**2 + 10.0),
        ((1e6, -1e6), 20.0),
    ],
)
def test_prey_pay_for_leaving(place, expected):
    penalty = boundary_penalty(torch.tensor(place, dtype=torch.float64))
    assert penalty.item() == pytest.approx(expected)


# mpe2


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("counts", ["3-1-2", "1-3-4", "2-2-0"])
def test_every_step_agrees_with_mpe2(counts, continuous):
    predators, prey, obstacles = map(int, counts.split("-"))
    steps, num_envs = 60, 8
    options: dict[str, Any] = {"obstacles_collide": True, "shared_reward": True}
    options |= {"prey": "learned", "continuous_actions": continuous}
    env = SimpleTag(num_envs, counts=counts, dtype=torch.float64, **options)
    rng = np.random.default_rng(int(counts.replace("-", "")) + continuous)
    state = rng.uniform(-0.3, 0.3, env.state.shape)  # close together: they collide
    state[:, env.num_movable :, 2:] = 0
    env.state.copy_(torch.from_numpy(state))
    sizes = {"num_good": prey, "num_adversaries": predators, "num_obstacles": obstacles}
    oracles = [Oracle(sizes, continuous, row) for row in state]
    touches = blocked = 0
    for _ in range(steps):
        shape = (num_envs, predators + prey)
        if continuous:
            actions = rng.uniform(0, 1, (*shape, 5))
        else:
            actions = rng.integers(0, 5, shape)
        parts = np.split(actions, [predators], 1)
        pairs = zip(("predator", "prey"), map(torch.from_numpy, parts), strict=True)
        step_rewards = env.step(dict(pairs)).rewards
        blocked += against_obstacles(env)
        expected = [o.step(row) for o, row in zip(oracles, actions, strict=True)]
        rewards = torch.cat((step_rewards["predator"], step_rewards["prey"]), 1)
        touches += int((step_rewards["predator"] > 0).sum())
        states = np.stack([oracle.state() for oracle in oracles])
        np.testing.assert_allclose(env.state, states, rtol=0, atol=1e-9)
        np.testing.assert_allclose(rewards, np.stack(expected), rtol=0, atol=1e-9)
    assert touches > 10
    assert blocked > 10 or not obstacles


def against_obstacles(env: SimpleTag) -> int:
    """Count the predators and prey that stand in an obstacle."""
    agents, obstacles = env.state[:, :, None, :2], env.state[:, None, :, :2]
    distance = (agents - obstacles).norm(dim=-1)
    return int((distance[:, : env.num_movable, env.num_movable :] < 0.2).sum())


class Oracle:
    """mpe2's env, from a state of our choice."""

    def __init__(self, sizes: dict[str, int], continuous: bool, state: Any) -> None:
        options = {"max_cycles": 10_000, "continuous_actions": continuous}
        self.env = simple_tag_v3.raw_env(**sizes, **options)
        self.env.reset(seed=0)
        for entity, row in zip(self.env.world.entities, state, strict=True):
            entity.state.p_pos, entity.state.p_vel = row[:2].copy(), row[2:].copy()

    def step(self, actions: np.ndarray) -> list[float]:
        for action in actions:
            self.env.step(action)
        return list(self.env.rewards.values())

    def state(self) -> np.ndarray:
        parts = [(e.state.p_pos, e.state.p_vel) for e in self.env.world.entities]
        return np.stack([np.concatenate(part) for part in parts])


# Obstacles


@kinds
def test_obstacles_have_no_influence_unless_they_collide(prey):
    options: dict[str, Any] = {"prey": prey, "seed": 3}
    without = SimpleTag(16, counts="1-3-0", **options)
    noisy = SimpleTag(16, counts="1-3-28", **options)
    solid = SimpleTag(16, counts="1-3-28", obstacles_collide=True, **options)
    for env in (without, noisy, solid):
        env.reset()
    still = noisy.state[:, 4:].clone()
    states, rewards = run(without, 80)
    noisy_states, noisy_rewards = run(noisy, 80)
    assert torch.equal(states, noisy_states[:, :, :4])
    assert torch.equal(rewards, noisy_rewards)
    assert torch.equal(noisy.state[:, 4:], still)
    assert not torch.equal(states, run(solid, 80)[0][:, :, :4])
    assert torch.equal(solid.state[:, 4:], still)


# Prey


@pytest.mark.parametrize("continuous", [True, False])
def test_random_prey_choose_uniformly_among_five(continuous):
    env = SimpleTag(
        200, counts="1-3-0", continuous_actions=continuous, dtype=torch.float64
    )
    env.reset()
    env.state[:, :, :2] = torch.arange(4).double()[:, None] * 10  # no contacts
    sides = torch.tensor([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]) * 0.4
    counts = torch.zeros(5)
    for step in range(20):
        env.state[..., 2:] = 0
        env.step(actions_for(env, step))
        changes = env.state[:, 1:, None, 2:] - sides
        near, choice = changes.norm(dim=-1).min(-1)
        assert near.max() < 1e-6
        counts += torch.bincount(choice.flatten(), minlength=5)
    expected = counts.sum() / 5
    # Chi-squared with 4 degrees of freedom exceeds 24 once in ten thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 24


def test_random_prey_differ_between_seeds_envs_and_episodes():
    def path(**streams: int) -> Tensor:
        env = SimpleTag(1, counts="1-3-0", dtype=torch.float64, **streams)
        env.reset()
        env.state.zero_()
        env.state[..., 0] = torch.arange(4)
        return torch.stack([env.step(noop(env)) and env.state.clone() for _ in "abcde"])

    streams = [{}, {"seed": 1}, {"first_env": 1}, {"first_episode": 1}]
    paths = [path(**options) for options in streams]
    for i, trajectory in enumerate(paths):
        assert torch.equal(trajectory, path(**streams[i]))
        assert not any(torch.equal(trajectory, earlier) for earlier in paths[:i])


points = st.tuples(st.floats(-2, 2), st.floats(-2, 2))


@given(predators=st.lists(points, min_size=1, max_size=4), home=points, extra=points)
def test_flight_is_a_direction_that_turns_with_what_it_is_given(predators, home, extra):
    near = torch.tensor(predators, dtype=torch.float64)
    goal = torch.tensor(home, dtype=torch.float64)
    direction = flight(near, goal)
    assert direction.shape == (2,)
    assert float(direction.norm()) == pytest.approx(1.0) or float(direction.norm()) < 1
    torch.testing.assert_close(flight(turned(near), turned(goal)), turned(direction))
    extended = torch.cat((near, torch.tensor([extra], dtype=torch.float64)))
    absent = torch.arange(len(extended)) == len(near)
    torch.testing.assert_close(flight(extended, goal, absent), direction)


def turned(points: Tensor) -> Tensor:
    """A quarter turn to the left."""
    return torch.stack((-points[..., 1], points[..., 0]), -1)


def test_prey_run_from_the_nearest_predator_and_home_from_afar():
    near = torch.tensor([[0.2, 0.0], [0.0, 1.0]])
    origin, far = torch.zeros(2), torch.tensor([0.0, -3.0])
    away = flight(near, origin)
    assert away[0] < -0.9
    assert -0.3 < away[1] < 0
    assert flight(near, far)[1] < -0.9
    assert flight(near[:1] * 0, origin).tolist() == [0, 0]
    assert flight(near, origin, torch.ones(2, dtype=torch.bool)).tolist() == [0, 0]


@pytest.mark.parametrize("continuous", [True, False])
def test_fleeing_prey_do_what_the_heuristic_says(continuous):
    options: dict[str, Any] = {"counts": "2-1-2", "continuous_actions": continuous}
    scripted = SimpleTag(50, prey="flee", **options)
    learned = SimpleTag(50, prey="learned", **options)
    learned.reset()
    # The mean of all others stands where the environment's own prey have their home.
    state = learned.state
    state[:, 4, :2] = -state[:, [0, 1, 3], :2].sum(1)
    scripted.reset()
    scripted.state.copy_(state)
    policy = make_heuristic("simple_tag", learned.groups["prey"], role="prey")
    actions = actions_for(learned, 0)
    actions["prey"] = policy.act(learned.observe()["prey"]).action
    before = state[:, 2, 2:].clone()
    learned.step(actions)
    scripted.step({"predator": actions["predator"]})
    torch.testing.assert_close(scripted.state, learned.state)
    assert ((learned.state[:, 2, 2:] - 0.75 * before).norm(dim=-1) > 0.3).all()


# Actions and ends


def test_discrete_actions_equal_unit_continuous_ones():
    options: dict[str, Any] = {"counts": "2-2-1", "prey": "learned", "seed": 3}
    discrete = SimpleTag(5, **options)
    continuous = SimpleTag(5, continuous_actions=True, **options)
    discrete.reset()
    continuous.reset()
    assert continuous.groups["prey"].action_space == spaces.Box(0, 1, (5,), np.float32)
    for step in range(10):
        choices = actions_for(discrete, step)
        discrete.step(choices)
        continuous.step({name: torch.eye(5)[c] for name, c in choices.items()})
        assert torch.equal(discrete.state, continuous.state)


def test_a_push_has_the_strength_of_its_kind():
    env = env_at([[0, 0], [5, 5]], counts="1-1-0", prey="learned")
    choice = torch.tensor([[2]])
    env.step({"predator": choice, "prey": choice + 1})
    assert env.state[0, 0, 2:].tolist() == pytest.approx([0.3, 0])
    assert env.state[0, 1, 2:].tolist() == pytest.approx([0, -0.4])
    for _ in range(30):
        env.step({"predator": choice, "prey": choice + 1})
    speeds = env.state[0, :, 2:].norm(dim=-1)
    assert speeds.tolist() == pytest.approx([1.0, 1.3])


def test_learning_prey_must_act_and_others_must_not():
    env, learned = SimpleTag(1), SimpleTag(1, prey="learned")
    with pytest.raises(InputError, match="expected the groups predator, prey, got pre"):
        learned.step(noop(env))
    with pytest.raises(InputError, match="expected the groups predator, got predator,"):
        env.step(noop(learned))
    for action in (5, -1):
        message = f"expected choices from 0 to 4, got {action}"
        with pytest.raises(InputError, match=message):
            env.step({"predator": torch.tensor([[action]])})


# Heuristics


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("counts", ["1-3-28", "1-3-0", "3-1-2"])
def test_chasing_solves_the_task(counts, continuous):
    options: dict[str, Any] = {"counts": counts, "continuous_actions": continuous}
    (best,) = returns(SimpleTag(64, **options), "predator")
    (chance,) = returns(SimpleTag(64, **options), None)
    assert best > 120
    assert chance < 45
    assert best > 8 * chance


def test_chasing_catches_fleeing_prey_too():
    (best,) = returns(SimpleTag(128, prey="flee"), "predator")
    (chance,) = returns(SimpleTag(128, prey="flee"), None)
    assert best > 20
    assert best > 4 * chance


def test_fleeing_saves_prey():
    caught, lost = returns(SimpleTag(64, prey="learned"), "predator", "prey")
    its_caught, its_lost = returns(SimpleTag(64, prey="learned"), "predator", None)
    assert caught < its_caught / 4
    assert lost > its_lost / 3


def heuristic(role: str, continuous: bool) -> tuple[Policy, Tokens]:
    options = {"prey": "learned", "continuous_actions": bool(continuous), "seed": 1}
    env = SimpleTag(6, counts="2-3-4", **options)
    env.reset()
    group = env.groups[role]
    return make_heuristic("simple_tag", group, role=role), env.observe()[role]


each_heuristic = pytest.mark.parametrize(
    ("role", "continuous", "watched"),
    [(role, flag, n) for role, n in (("predator", 3), ("prey", 2)) for flag in (1, 0)],
)


@each_heuristic
def test_heuristics_ignore_what_lies_under_padding(role, continuous, watched):
    policy, tokens = heuristic(role, continuous)
    # One of those watched, and an obstacle.
    padded = torch.zeros_like(tokens.padding)
    place = int((tokens.types[0, 0] == watched).nonzero()[0])
    padded[..., [2, place]] = True
    features = torch.where(padded[..., None], torch.nan, tokens.features)
    places = [i for i in range(tokens.num_tokens) if i not in (2, place)]
    short = tokens.map(lambda part: part[:, :, places])
    decision = policy.act(Tokens(features, tokens.types, padded))
    expected = policy.act(short)
    torch.testing.assert_close(decision.logits, expected.logits)
    torch.testing.assert_close(decision.action, expected.action)
    assert not torch.equal(decision.logits, policy.act(tokens).logits)


@each_heuristic
def test_heuristics_rest_when_they_see_nobody(role, continuous, watched):
    policy, tokens = heuristic(role, continuous)
    padded = Tokens(tokens.features, tokens.types, tokens.types != 0)
    action = policy.act(padded).action
    assert action.shape == tokens.batch_shape + ((5,) if continuous else ())
    assert not action.any()


def test_chasing_ignores_obstacles_and_other_predators():
    policy, tokens = heuristic("predator", continuous=True)
    noise = (tokens.types == 1) | (tokens.types == 2)
    features = torch.where(noise[..., None], torch.nan, tokens.features)
    decision = policy.act(Tokens(features, tokens.types, tokens.padding))
    assert torch.equal(decision.logits, policy.act(tokens).logits)


def test_chasing_meets_its_prey_two_steps_later():
    env = SimpleTag(1, counts="1-2-0", prey="learned", continuous_actions=True)
    env.reset()
    start = [[0, 0, 0.1, 0], [0.14, 0.02, 0, 0], [3, 3, 0, 0]]
    env.state.copy_(torch.tensor([start]))
    policy = make_heuristic("simple_tag", env.groups["predator"], role="predator")
    force = policy.act(env.observe()["predator"]).logits[0, 0]
    velocity = 0.75 * torch.tensor([0.1, 0]) + 0.1 * force
    meeting = torch.tensor([0.1 * 0.1, 0]) + 0.1 * velocity
    torch.testing.assert_close(meeting, torch.tensor([0.14, 0.02]))


# Drawing


def test_render_draws_the_env_and_its_colors():
    env = SimpleTag(2, counts="1-3-5")
    env.reset()
    image = env.frame(1)
    for entity, kind in enumerate(env.entities):
        x, y = env.state[1, entity, :2].tolist()
        scale = 512 / (2 * env.extent)
        row, column = int(256 - y * scale), int(256 + x * scale)
        near = image[row - 1 : row + 2, column - 1 : column + 2].reshape(-1, 3)
        colors = {item.color for item in env.entities}  # one may hide another
        assert {tuple(int(c) for c in pixel) for pixel in near} & colors, kind.kind
    assert not np.array_equal(image, env.frame(0))


def test_render_draws_attention_of_either_group():
    env = env_at([[-1, 0], [1, 0], [0, 1]], counts="1-1-1", prey="learned")
    weights = torch.tensor([0.0, 1.0, 0.0])  # to the obstacle
    plain = env.frame().astype(int)
    for group, is_left in (("predator", True), ("prey", False)):
        image = env.frame(attention=weights, group=group).astype(int)
        columns = (np.abs(image - plain).sum(-1) > 0).any(0).nonzero()[0]
        assert (columns < 250).any() == is_left
        assert (columns > 262).any() != is_left


@pytest.mark.parametrize("prey", ["random", "flee"])
def test_a_trajectory_does_not_depend_on_the_batch(prey):
    def forces(num_envs: int) -> torch.Tensor:
        env = SimpleTag(num_envs, counts="2-3-4", prey=prey)
        env.reset()
        generator, values = torch.Generator().manual_seed(3), []
        for _ in range(40):
            actions = torch.randint(0, 5, (64, 2), generator=generator)[:num_envs]
            env.step({"predator": actions})
            values += [env.contact_forces().flatten(1), env.state.flatten(1)]
        return torch.cat(values, 1)

    whole = forces(64)
    assert (whole != 0).any()
    for num_envs in (1, 2, 3, 5, 7, 33):
        assert torch.equal(forces(num_envs), whole[:num_envs]), num_envs


# Golden


def golden() -> dict[str, Any]:
    """Short trajectories of two environments, one for each kind of prey."""
    trajectories: dict[str, Any] = {"version": SimpleTag.version}
    options: dict[str, Any] = {"seed": 7, "dtype": torch.float64, "max_steps": 12}
    for prey in KINDS:
        env = SimpleTag(2, counts="2-2-2", prey=prey, **options)
        env.reset()
        start = env.state.tolist()
        states, rewards = run(env, 12)
        trajectories[prey] = {
            "start": start,
            "states": states[5::6].tolist(),
            "rewards": rewards.tolist(),
            "features": env.observe()["predator"].features[0, 0].tolist(),
        }
    return trajectories


def test_the_golden_trajectory_has_not_changed():
    expected, data = json.loads(GOLDEN.read_text()), golden()
    assert expected.keys() == data.keys()
    assert expected["version"] == data["version"]
    for prey in KINDS:
        for name, values in expected[prey].items():
            np.testing.assert_allclose(
                data[prey][name], values, rtol=0, atol=1e-9, err_msg=f"{prey} {name}"
            )


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden()) + "\n")
