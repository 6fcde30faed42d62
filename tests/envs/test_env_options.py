"""Options that environments share: numbers of entities, steering."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from helpers.tables import yaml_cases
from marl_pool.envs import env_names, make_batched_env
from marl_pool.envs.options import entity_counts
from marl_pool.envs.particles.physics import Steering
from marl_pool.utils.errors import InputError

NUMBERS = {
    "simple_centroid": ("num_agents", "num_signal", "num_noise"),
    "simple_tag": ("num_predators", "num_prey", "num_obstacles"),
}


def numbers_of(name: str, **options: Any) -> tuple[int, ...]:
    env = make_batched_env(name, 1, **options)
    return tuple(getattr(env, key) for key in NUMBERS[name])


@pytest.mark.parametrize("name", NUMBERS)
def test_counts_and_numbers_say_how_many_there_are(name):
    assert numbers_of(name) == (1, 3, 28)
    assert numbers_of(name, counts="2-31-0") == (2, 31, 0)
    for place, key in enumerate(NUMBERS[name]):
        expected = [2, 31, 0]
        expected[place] = 5
        # A number takes the place of its part, and of no other.
        assert numbers_of(name, counts="2-31-0", **{key: 5}) == tuple(expected)


@given(numbers=st.tuples(*[st.integers(0, 10**6)] * 3))
def test_counts_are_read_as_they_are_written(numbers):
    keys = dict.fromkeys("abc")
    written = "-".join(map(str, numbers))
    assert entity_counts(written, (0, 0, 0), **keys) == numbers


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "counts",
    ["", "1", "1-3", "1-3-28-4", "1-3-", "-1-3-2", "1-3-x", "1--3", " 1-3-2", 3],
)
def test_other_forms_of_counts_are_refused(name, counts):
    with pytest.raises(InputError) as caught:
        make_batched_env(name, 1, counts=counts)
    assert str(caught.value) == (
        f"env.counts: expected three numbers such as 1-3-28, got {counts!r}"
    )


@pytest.mark.parametrize(
    ("name", "counts", "message"),
    [
        ("simple_centroid", "16384-16384-16384", "16,384 agents x 49,152 tokens"),
        ("simple_tag", "16384-1-16384", "16,384 agents x 32,769 tokens"),
        ("simple_tag", "1-16384-16384", "268,435,456 pairs of entities that collide"),
    ],
)
def test_numbers_whose_product_no_memory_holds_are_refused(name, counts, message):
    with pytest.raises(InputError, match=message):
        make_batched_env(name, 1, counts=counts)


def test_numbers_that_are_too_small_are_refused():
    keys = {"num_cats": None, "num_dogs": None}
    message = "^env.counts: num_dogs: expected an integer >= 2, got '0-1'$"
    with pytest.raises(InputError, match=message):
        entity_counts("0-1", (0, 2), **keys)
    assert entity_counts("0-1", (0, 2), num_cats=7, num_dogs=2) == (7, 2)
    for counts, key in (("0-3-2", "num_predators"), ("1-0-2", "num_prey")):
        with pytest.raises(InputError, match=f"^env.counts: {key}: .* >= 1"):
            make_batched_env("simple_tag", 1, counts=counts)


@pytest.mark.parametrize(("number", "text"), [(1.5, "1.5"), ("1", "'1'")])
def test_overrides_are_whole_numbers(number, text):
    expected = f"env.num_noise: expected an integer >= 0 or null, got {text}"
    with pytest.raises(InputError, match=f"^{expected}$"):
        make_batched_env("simple_centroid", 1, num_noise=number)


@yaml_cases("name, key, value, expected")
def test_options_are_refused_by_their_key(name, key, value, expected):
    value = __file__ if value == "PICTURE" else value
    with pytest.raises(InputError, match=rf"^env\.{key}: expected {expected}$"):
        make_batched_env(name, **{"num_envs": 1, key: value})


@pytest.mark.parametrize("name", sorted({*env_names()} - {"pettingzoo"}))
@pytest.mark.parametrize("key", ["max_steps", "num_envs"])
def test_every_env_has_a_step_and_an_instance(name, key):
    expected = rf"^env\.{key}: expected an integer >= 1, got 0$"
    with pytest.raises(InputError, match=expected):
        make_batched_env(name, **{"num_envs": 1, key: 0})


forces = st.lists(
    st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=5
).map(lambda rows: torch.tensor([rows], dtype=torch.float64))


@given(force=forces, acceleration=st.floats(0.5, 8))
def test_steering_comes_as_near_to_a_force_as_it_can(force, acceleration):
    options: dict[str, Any] = {"dtype": torch.float64}
    discrete = Steering(acceleration, continuous=False, **options)
    choices = discrete.toward(force)
    assert choices.shape == force.shape[:-1]
    sides = [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]
    pushes = torch.tensor(sides, dtype=torch.float64) * acceleration
    away = (force[..., None, :] - pushes).norm(dim=-1)
    error = (discrete.forces(choices) - force).norm(dim=-1)
    torch.testing.assert_close(error, away.amin(-1))

    continuous = Steering(acceleration, continuous=True, **options)
    shares = continuous.toward(force)
    assert continuous.space.contains(shares[0, 0].float().numpy())
    expected = force.clamp(-acceleration, acceleration)
    torch.testing.assert_close(continuous.forces(shares), expected)


def test_steering_has_the_spaces_of_mpe():
    assert Steering(1.0, continuous=False).space == spaces.Discrete(5)
    assert Steering(1.0, continuous=True).space == spaces.Box(0, 1, (5,))
