"""Simple tag: spawns, rewards, prey, pictures, golden trajectory.

``python tests/envs/particles/test_simple_tag.py`` writes the golden file anew; a change
in it is a change of the dynamics, which asks for a higher ``SimpleTag.version``.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.particles import actions_for, mean_returns, no_op, particles, run
from helpers.paths import GOLDEN_FILES
from marl_pool.envs import make_heuristic
from marl_pool.envs.particles.simple_tag import SimpleTag, boundary_penalty, flight
from marl_pool.utils.errors import InputError

GOLDEN = GOLDEN_FILES / "simple_tag.json"
KINDS = ("random", "flee", "learned")


# Starts


@pytest.mark.parametrize(
    ("options", "widest", "obstacles"),
    [
        ({}, 1.0, math.log(28, 4)),
        ({"counts": "1-3-4"}, 1.0, 2.0),
        ({"counts": "9-7-64"}, 2.0, 3.0),
        ({"counts": "1-1-1"}, 0.5, 2.0),
        ({"obstacle_spread": 0.9}, 1.0, 0.9),
    ],
)
def test_starts_lie_where_the_published_env_puts_them(options, widest, obstacles):
    env = SimpleTag(6000, **options)
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
        # Maximum of 32 coordinates of an environment: close to its own half side.
        half = position.flatten(1).abs().amax(1) * 33 / 32
        assert half.mean() == pytest.approx((widest + 0.1) / 2, rel=0.03)
        assert half.std() == pytest.approx((widest - 0.1) / math.sqrt(12), rel=0.05)


# Rewards


def env_at(positions: list[list[float]], **options: Any) -> SimpleTag:
    """An environment whose entities rest at these places and stay for a step."""
    env: SimpleTag = particles("simple_tag", 1, **options)
    env.state.zero_()
    env.state[0, :, :2] = torch.tensor(positions, dtype=torch.float64)
    return env


@pytest.mark.parametrize("shared", [False, True])
def test_predators_are_rewarded_for_the_prey_that_they_touch(shared):
    # Touching is a distance of at most 0.125, here along x; prey 2 is far away.
    places = [[0.0, 0.0], [0.24, 0.0], [0.0, -0.9], [0.125, 0.0], [0.0, 0.1], [9, 9]]
    env = env_at(places, counts="3-3-0", prey="learned", shared_reward=shared)
    rewards = env.step(no_op(env)).rewards
    expected = [30.0] * 3 if shared else [20.0, 10.0, 0.0]
    assert rewards["predator"].tolist() == [expected]
    touched = torch.tensor([[20.0, 10.0, 0.0]], dtype=torch.float64)
    away = boundary_penalty(env.state[:, 3:, :2])
    torch.testing.assert_close(rewards["prey"], -touched - away)
    assert away[0].tolist() == [0.0, 0.0, 20.0]


@pytest.mark.parametrize(
    ("distance", "reward"), [(0.1249, 10.0), (0.125, 10.0), (0.1251, 0.0)]
)
def test_touching_ends_at_the_sum_of_the_sizes(distance, reward):
    env = env_at([[0.0, 0.0], [distance, 0.0]], counts="1-1-0", prey="flee")
    assert env.step(no_op(env)).rewards["predator"].tolist() == [[reward]]


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


# Obstacles


@pytest.mark.parametrize("prey", KINDS)
def test_obstacles_have_no_influence_unless_they_collide(prey):
    options: dict[str, Any] = {"prey": prey, "seed": 3}
    without = particles("simple_tag", 16, counts="1-3-0", **options)
    noisy = particles("simple_tag", 16, **options)
    solid = particles("simple_tag", 16, obstacles_collide=True, **options)
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
    options = {"counts": "1-3-0", "continuous_actions": continuous}
    env = particles("simple_tag", 200, **options)
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
    """Rotate by a quarter turn to the left."""
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


# Actions


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
        learned.step(no_op(env))
    with pytest.raises(InputError, match="expected the groups predator, got predator,"):
        env.step(no_op(learned))
    with pytest.raises(InputError, match="expected the groups predator, got none"):
        env.step({})
    choices = {name: choice.byte() for name, choice in no_op(env).items()}
    with pytest.raises(InputError, match=r"expected int64, got torch\.uint8"):
        env.step(choices)


def test_fleeing_saves_prey():
    caught, lost = mean_returns("simple_tag", 64, prey="learned").values()
    its_caught, its_lost = mean_returns(
        "simple_tag", 64, random=["prey"], prey="learned"
    ).values()
    assert caught < its_caught / 4
    assert lost > its_lost / 3


# Drawing


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
    options: dict[str, Any] = {"seed": 7, "max_steps": 12}
    for prey in KINDS:
        env = particles("simple_tag", 2, counts="2-2-2", prey=prey, **options)
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
