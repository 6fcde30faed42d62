"""Heuristics of the particle tasks: their returns, inputs and actions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.particles import mean_returns, no_op, particles
from marl_pool.envs import make_heuristic
from marl_pool.envs.particles.heuristics import CentroidHeuristic, nearest_pairs
from marl_pool.envs.particles.physics import DAMPING, DT
from marl_pool.envs.particles.simple_centroid import SimpleCentroid
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

each_action = pytest.mark.parametrize("continuous", [False, True])

# Returns


@each_action
@pytest.mark.parametrize(
    ("name", "options", "group", "chance", "least"),
    [
        ("simple_centroid", {"num_agents": 3}, "agent", -1.7, -0.4),
        ("simple_tag", {}, "predator", 30, 240),
        ("simple_tag", {"counts": "3-1-2"}, "predator", 15, 120),
        ("simple_tag", {"prey": "flee"}, "predator", 5, 20),
        # An agent of mpe2 that knows the goal has -7.2, one at the centroid -15.3.
        ("simple_speaker_listener", {}, "listener", -30, -10),
        ("simple_reference", {}, "agent", -25, -14),
        ("simple_reference", {"num_words": 2, "num_landmarks": 5}, "agent", -24, -22),
        ("simple_adversary", {}, "agent", 0, 0),
        ("simple_push", {}, "agent", -20, -10),
        ("simple_spread", {}, "agent", -24, -12),
        ("simple_world_comm", {}, "adversary", 15, 20),
        ("simple_world_comm", {}, "agent", -24, -22),
    ],
)
def test_scripts_solve_the_tasks(name, options, group, chance, least, continuous):
    options = {**options, "continuous_actions": continuous, "seed": 1}
    chances = mean_returns(name, 64, random=[group], **options)
    assert chances[group] < chance
    assert mean_returns(name, 64, **options)[group] > least


@pytest.mark.parametrize(
    ("continuous", "expected", "reach"), [(True, -0.233, 0.1), (False, -0.364, 0.3)]
)
def test_heuristic_holds_the_centroid_from_any_start(continuous, expected, reach):
    env = particles("simple_centroid", 256, continuous_actions=continuous)
    script = make_heuristic("simple_centroid", env.groups["agent"])
    returns = Rollout(env, {"agent": script}).episodes().returns["agent"]
    assert float(returns.mean()) == pytest.approx(expected, abs=0.03)
    away = env.state[:, 0, :2] - env.centroid()
    assert away.norm(dim=-1).max() < reach


@pytest.mark.parametrize(
    ("counts", "expected", "floor"),
    [
        ("1-3-28", -0.433, -1.89),
        ("1-31-0", -0.416, -1.78),
        ("1-15-16", -0.419, -1.81),
        ("1-1-30", -0.476, -2.09),
    ],
)
def test_returns_agree_with_an_independent_implementation(counts, expected, floor):
    """The figures were measured once with another version of the env.

    Its controller did not reckon with the delay of a step. Both means are over 512
    episodes, with standard errors near 0.004 and 0.02.
    """
    env = SimpleCentroid(256, counts=counts)
    group = env.groups["agent"]
    script = make_heuristic("simple_centroid", group)
    assert isinstance(script, CentroidHeuristic)
    script.lead = (1 - DAMPING) * DT
    for policy, mean, error in (
        (script, expected, 0.025),
        (RandomPolicy(group.action_space), floor, 0.09),
    ):
        returns = Rollout(env, {"agent": policy}).episodes().returns["agent"]
        assert float(returns.mean()) == pytest.approx(mean, abs=error)


@pytest.mark.parametrize("num_agents", [1, 3, 6])
def test_landmarks_are_covered(num_agents):
    env = particles(
        "simple_spread", 200, num_agents=num_agents, continuous_actions=True
    )
    script = make_heuristic("simple_spread", env.groups["agent"])
    rewards = Rollout(env, {"agent": script}).steps(24)["agent"].rewards[-1]
    # Half of the sum of distances; agents of which some touch hinder each other.
    assert -rewards.amax(1).mean() < 0.12 * num_agents


@pytest.mark.parametrize(
    ("options", "perturbation"),
    [
        ({"arrivals": [{"type": "landmark", "step": 3}]}, None),
        ({}, ["duplicate", 1.0]),
        ({}, ["shuffle", 1.0]),
    ],
)
def test_listeners_reach_the_goal_with_other_landmarks(options, perturbation):
    env = particles("simple_speaker_listener", 32, **options)
    policies = {
        role: make_heuristic("simple_speaker_listener", group, role=role)
        for role, group in env.groups.items()
    }
    if perturbation is not None:
        name, severity = perturbation
        perturbation = make_perturbation(name, severity=severity)
    Rollout(env, policies, perturbation=perturbation).episodes()
    gap = (env._positions["listener"] - env.goal_places()).norm(dim=-1)
    assert gap.max() < 0.2


# Inputs


@pytest.mark.parametrize("role", [None, "agent"])
def test_a_heuristic_has_a_role(role):
    group = particles("simple_tag", 1).groups["predator"]
    message = f"unknown role of heuristic 'simple_tag': {role!r}: choose from predator,"
    with pytest.raises(InputError, match=message):
        make_heuristic("simple_tag", group, role=role)


def script_of(name: str, role: str, continuous: bool) -> tuple[Policy, Tokens]:
    counts = {"prey": "learned"} if name == "simple_tag" else {}
    options = {"counts": "2-3-4", "continuous_actions": continuous, **counts}
    env = particles(name, 6, seed=1, dtype=torch.float32, **options)
    return make_heuristic(name, env.groups[role], role=role), env.observe()[role]


each_script = pytest.mark.parametrize(
    ("name", "role", "watched"),
    [
        ("simple_centroid", "agent", 2),
        ("simple_tag", "predator", 3),
        ("simple_tag", "prey", 2),
    ],
)


@each_action
@each_script
def test_scripts_ignore_values_under_padding(name, role, watched, continuous):
    policy, tokens = script_of(name, role, continuous)
    # One of those watched, and an entity that rests.
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


@each_action
@each_script
def test_scripts_stay_still_when_they_see_nobody(name, role, watched, continuous):
    policy, tokens = script_of(name, role, continuous)
    # Fleeing prey have their home among all others.
    seen = tokens.types != 0 if role == "prey" else tokens.types == watched
    action = policy.act(Tokens(tokens.features, tokens.types, seen)).action
    assert action.shape == tokens.batch_shape + ((5,) if continuous else ())
    assert not action.any()


@pytest.mark.parametrize(("name", "role", "watched"), each_script.args[1][:2])
def test_scripts_ignore_irrelevant_entities(name, role, watched):
    policy, tokens = script_of(name, role, continuous=True)
    unwatched = (tokens.types != watched) & (tokens.types != 0)
    features = torch.where(unwatched[..., None], torch.nan, tokens.features)
    decision = policy.act(Tokens(features, tokens.types, tokens.padding))
    assert torch.equal(decision.logits, policy.act(tokens).logits)


def test_agents_without_a_landmark_rest():
    env = particles("simple_spread", 50, num_landmarks=1)
    script = make_heuristic("simple_spread", env.groups["agent"])
    force = script.act(env.observe()["agent"]).logits
    assert ((force == 0).all(-1).sum(1) == 2).all()


# Actions


def test_chasing_meets_its_prey_two_steps_later():
    options = {"counts": "1-2-0", "prey": "learned", "continuous_actions": True}
    env = particles("simple_tag", 1, **options)
    start = [[0, 0, 0.1, 0], [0.14, 0.02, 0, 0], [3, 3, 0, 0]]
    env.state.copy_(torch.tensor([start]))
    policy = make_heuristic("simple_tag", env.groups["predator"], role="predator")
    force = policy.act(env.observe()["predator"]).logits[0, 0]
    velocity = 0.75 * torch.tensor([0.1, 0]) + 0.1 * force
    meeting = torch.tensor([0.1 * 0.1, 0]) + 0.1 * velocity
    torch.testing.assert_close(meeting, torch.tensor([0.14, 0.02]).double())


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_pairs_are_taken_nearest_first(num_rows, num_columns, seed):
    rng = np.random.default_rng(seed)
    distance = rng.permutation(num_rows * num_columns).reshape(num_rows, num_columns)
    expected, rest = [-1] * num_rows, distance.astype(float)
    for _ in range(min(num_rows, num_columns)):
        row, column = np.unravel_index(rest.argmin(), rest.shape)
        expected[row] = int(column)
        rest[row], rest[:, column] = np.inf, np.inf
    assert nearest_pairs(torch.from_numpy(distance).double()).tolist() == expected


def test_pairs_that_are_not_allowed_are_none():
    distance = torch.tensor([[torch.inf, 1.0], [torch.inf, 2.0]])
    assert nearest_pairs(distance).tolist() == [1, -1]


@each_action
@pytest.mark.parametrize("num_words", [2, 4])
def test_hunters_follow_the_leaders_signal_to_prey_in_forests(num_words, continuous):
    options = {"num_words": num_words, "continuous_actions": continuous}
    env = particles("simple_world_comm", 1, num_agents=1, **options)
    scripts = {
        name: make_heuristic("simple_world_comm", group, role=name)
        for name, group in env.groups.items()
    }
    env.state[..., :2] = -0.9  # predators; the rest is out of the way
    for kind in ("agent", "forest"):
        env.state[:, env._slices[kind], :2] = torch.tensor([0.9, -0.9]).double()
    for step in range(2):
        tokens = env.observe()
        forces = scripts["adversary"].act(tokens["adversary"]).logits
        # Before the leader has spoken hunters rest; its second word is at the right.
        assert (forces != 0).any() == bool(step)
        actions = no_op(env)
        if continuous:
            actions = {kind: torch.eye(5)[rest] for kind, rest in actions.items()}
        leader = scripts["leadadversary"].act(tokens["leadadversary"]).action
        env.step({**actions, "leadadversary": leader})
    assert (forces[..., 0] > 1).all()
    assert env.words[0, 0].argmax() == 1


def test_prey_flee_from_near_predators_and_otherwise_seek_food():
    env = particles("simple_world_comm", 1, num_agents=1, num_food=1)
    script = make_heuristic("simple_world_comm", env.groups["agent"], role="agent")
    env.state.zero_()
    env.state[:, env._slices["food"], 0] = 0.9
    env.state[:, env._slices["forest"], 1] = 5.0
    env.state[:, env._slices["leadadversary"], 0] = 5.0
    predators = env.state[:, env._slices["adversary"]]
    for place, direction in ((0.3, -1), (5.0, 1)):
        predators[..., 0] = place
        force = script.act(env.observe()["agent"]).logits
        assert (force[..., 0].sign() == direction).all()
