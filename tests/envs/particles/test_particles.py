"""Particle physics, against mpe2's `World`; what tokens show; random streams."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.particles import actions_for, mpe2_step, mpe2_world, no_op, particles
from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.physics import Entities, ParticleEnv
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

GREY = (128, 128, 128)


class PhysicsOnly(ParticleEnv):
    """The physics alone: all that moves is an agent, and only the first observes."""

    def __init__(self, num_envs: int, entities: Sequence[Entities]) -> None:
        super().__init__(
            num_envs, entities, extent=2.0, max_steps=9, dtype=torch.float64
        )
        spec, space = TokenSpec(1, 4, ("self",)), spaces.Box(-1, 1, (2,))
        self.groups = {"agent": AgentGroup(self.num_movable, spec, space)}

    def observe(self) -> dict[str, Tokens]:
        types = torch.zeros(self.num_envs, 1, 1, dtype=torch.int64)
        return {"agent": Tokens(self.state[:, None, :1], types, types.bool())}

    def token_entities(self, group: str) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.int64)

    def place(self, rows: Tensor, keys: Tensor) -> None:
        self.state[rows] = 0

    def advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        self.integrate(actions["agent"])
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return {"agent": self.state[:, : self.num_movable, 0]}, never


CASES = {
    "free": (Entities("a", 3, GREY), Entities("b", 2, GREY, movable=False)),
    "capped and heavy": (
        Entities("a", 2, GREY, max_speed=0.4),
        Entities("b", 2, GREY, max_speed=1.3, mass=2.5),
        Entities("c", 1, GREY),
        Entities("d", 1, GREY, movable=False),
    ),
    "all collide": (
        Entities("a", 4, GREY, size=0.15, collide=True, max_speed=1.0),
        Entities("b", 3, GREY, size=0.3, collide=True, mass=0.5),
        Entities("c", 3, GREY, size=0.2, collide=True, movable=False),
    ),
    "some collide": (
        Entities("a", 2, GREY, size=0.2, collide=True),
        Entities("ghost", 2, GREY, size=0.9),
        Entities("b", 2, GREY, size=0.1, collide=True, max_speed=0.7),
        Entities("wall", 2, GREY, size=0.4, collide=True, movable=False),
        Entities("mist", 1, GREY, size=0.9, movable=False),
    ),
    "one collides with a wall": (
        Entities("ghost", 1, GREY, size=0.9),
        Entities("a", 1, GREY, size=0.3, collide=True),
        Entities("wall", 1, GREY, size=0.4, collide=True, movable=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_physics_agree_with_mpe2_step_for_step(case):
    entities, num_envs, steps = CASES[case], 6, 60
    rng = np.random.default_rng(list(CASES).index(case))
    env = PhysicsOnly(num_envs, entities)
    count, moving = len(env.entities), env.num_movable
    state = rng.uniform(-0.6, 0.6, (num_envs, count, 4))
    state[:, moving:, 2:] = 0
    env.state.copy_(torch.from_numpy(state))
    worlds = [mpe2_world(env.entities, row) for row in state]
    for _ in range(steps):
        forces = rng.normal(0, 3, (num_envs, moving, 2))
        env.step({"agent": torch.from_numpy(forces)})
        expected = [mpe2_step(*pair) for pair in zip(worlds, forces, strict=True)]
        np.testing.assert_allclose(env.state, expected, rtol=0, atol=1e-9)


@given(
    kinds=st.lists(
        st.tuples(
            st.booleans(),
            st.floats(0.01, 0.5),
            st.one_of(st.none(), st.floats(0.1, 3)),
            st.floats(0.2, 4),
        ),
        min_size=1,
        max_size=4,
    ),
    still=st.lists(st.tuples(st.booleans(), st.floats(0.01, 0.5)), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_mixture_agrees_with_mpe2(kinds, still, seed):
    entities = [
        Entities("m", 1, GREY, size, True, collide, speed, mass)
        for collide, size, speed, mass in kinds
    ] + [Entities("s", 1, GREY, size, False, collide) for collide, size in still]
    rng = np.random.default_rng(seed)
    env = PhysicsOnly(1, entities)
    state = rng.uniform(-0.5, 0.5, (len(entities), 4))
    state[len(kinds) :, 2:] = 0
    env.state.copy_(torch.from_numpy(state))
    world = mpe2_world(entities, state)
    for _ in range(5):
        forces = rng.normal(0, 3, (len(kinds), 2))
        env.step({"agent": torch.from_numpy(forces)[None]})
        expected = mpe2_step(world, forces)
        np.testing.assert_allclose(env.state[0], expected, rtol=0, atol=1e-9)


def test_coinciding_entities_stay_finite():
    env = PhysicsOnly(1, [Entities("a", 2, GREY, collide=True)])
    env.step({"agent": torch.zeros(1, 2, 2, dtype=torch.float64)})
    assert torch.equal(env.state, torch.zeros(1, 2, 4, dtype=torch.float64))


def test_contact_forces_are_opposite_between_movable_entities():
    env = PhysicsOnly(3, [Entities("a", 2, GREY, size=0.3, collide=True)])
    generator = torch.Generator().manual_seed(0)
    env.state.copy_(torch.rand(3, 2, 4, generator=generator) * 0.3)
    forces = env.contact_forces()
    assert forces.abs().min() > 0
    torch.testing.assert_close(forces[:, 0], -forces[:, 1])


def test_entities_that_do_not_collide_feel_no_contact():
    env = PhysicsOnly(1, CASES["free"])
    assert torch.equal(env.contact_forces(), torch.zeros_like(env.state[:, :3, :2]))


def test_a_movable_kind_after_an_immovable_one_is_refused():
    with pytest.raises(InputError, match="movable kinds before"):
        PhysicsOnly(1, [Entities("a", 1, GREY, movable=False), Entities("b", 1, GREY)])


def test_selected_envs_are_independent_of_the_original():
    env = PhysicsOnly(3, CASES["all collide"])
    env.state.copy_(torch.linspace(-0.5, 0.5, 3 * 10 * 4).view(3, 10, 4))
    before = env.state.clone()
    subset = env.select(torch.tensor([2, 0]))
    subset.step({"agent": torch.ones(2, 7, 2, dtype=torch.float64)})
    assert torch.equal(env.state, before)
    env.step({"agent": torch.ones(3, 7, 2, dtype=torch.float64)})
    assert torch.equal(subset.state, env.state[[2, 0]])
    assert not torch.equal(env.state, before)


@pytest.mark.parametrize(
    ("name", "options", "group", "types", "signal", "scale", "orders"),
    [
        (
            *("simple_centroid", {"counts": "2-2-3"}, "agent"),
            *([0, 3, 3, 3, 1, 2, 2], {0, 2}, 5.0),
            [[0, 4, 5, 6, 1, 2, 3], [1, 4, 5, 6, 0, 2, 3]],
        ),
        (
            *("simple_tag", {"counts": "2-3-2", "prey": "learned"}, "predator"),
            *([0, 1, 1, 2, 3, 3, 3], {0, 2, 3}, 1.0),
            [[0, 5, 6, 1, 2, 3, 4], [1, 5, 6, 0, 2, 3, 4]],
        ),
        (
            *("simple_tag", {"counts": "2-3-2", "prey": "learned"}, "prey"),
            *([0, 1, 1, 2, 2, 3, 3], {0, 2, 3}, 1.0),
            [[2, 5, 6, 0, 1, 3, 4], [3, 5, 6, 0, 1, 2, 4], [4, 5, 6, 0, 1, 2, 3]],
        ),
        (
            *("simple_spread", {"num_agents": 2, "num_landmarks": 4}, "agent"),
            *([0, 1, 1, 1, 1, 2], {0, 1, 2}, 1.0),
            [[0, 2, 3, 4, 5, 1], [1, 2, 3, 4, 5, 0]],
        ),
    ],
)
def test_tokens_are_relative_and_in_the_published_order(
    name, options, group, types, signal, scale, orders
):
    env = particles(name, 3, **options)
    for _ in range(5):
        env.step(actions_for(env, 0))
    tokens = env.observe()[group]
    assert tokens.types.tolist() == [[types] * len(orders)] * 3
    assert not tokens.padding.any()
    assert env.token_entities(group).tolist() == orders
    mask = [kind in signal for kind in types]
    assert env.signal()[group].tolist() == [[mask] * len(orders)] * 3
    for agent, order in enumerate(orders):
        expected = (env.state[:, order] - env.state[:, order[:1]]) / scale
        torch.testing.assert_close(tokens.features[:, agent], expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [("simple_centroid", {"counts": "1-3-0"}), ("simple_tag", {"counts": "1-3-0"})],
)
def test_random_forces_differ_between_seeds_envs_and_episodes(name, options):
    def path(**streams: int) -> Tensor:
        env = particles(name, 1, continuous_actions=False, **options, **streams)
        env.state.zero_()
        env.state[..., 0] = torch.arange(4)
        return torch.stack(
            [env.step(no_op(env)) and env.state.clone() for _ in "abcde"]
        )

    streams = [{}, {"seed": 1}, {"first_env": 1}, {"first_episode": 1}]
    paths = [path(**options) for options in streams]
    for i, trajectory in enumerate(paths):
        assert torch.equal(trajectory, path(**streams[i]))
        assert not any(torch.equal(trajectory, earlier) for earlier in paths[:i])
