"""Onset and end of a perturbation, and the agents and groups that it covers."""

from typing import Any

import pytest
from torch.testing import assert_close

from helpers.perturbed import (
    OBSERVED,
    at_time,
    build,
    make_tokens,
    play,
    same,
    states,
    variants,
)
from marl_pool.api.perturb import PerturbedParallelEnv
from marl_pool.envs import make_batched_env, make_env
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError

TAG: dict[str, Any] = {"counts": "2-2-1", "prey": "learned"}
each_perturbation = pytest.mark.parametrize("name", OBSERVED)


def is_unperturbed(output: Tokens, true: Tokens) -> bool:
    """Equal bit for bit, except for added padding."""
    original = output.map(lambda part: part[:, :, : true.num_tokens])
    return same(original, true) and bool(output.padding[:, :, true.num_tokens :].all())


@each_perturbation
def test_steps_outside_the_window_are_unperturbed(name):
    tokens = make_tokens(0)
    perturbation = build(name, severity=0.7, onset=2, end=5)
    marks = []
    for time, (output, state) in enumerate(
        states(perturbation, tokens, steps=7, moves=True)
    ):
        true = at_time(tokens, time)
        inside = 2 <= time < 5
        assert is_unperturbed(output, true) or inside
        marks.append(bool(perturbation.perceive(true, output, state).marks()))
        assert not marks[-1] or inside
    # A frozen or delayed token is behind one step after the onset.
    assert marks[3:5] == [True, True]


@each_perturbation
def test_perceiving_leaves_the_state_as_it_is(name):
    tokens = make_tokens(0)
    perturbation = build(name, severity=0.7, onset=1, end=3, agents=[0])
    for time, (output, state) in enumerate(
        states(perturbation, tokens, steps=5, moves=True)
    ):
        before = {key: tensor.clone() for key, tensor in state.items()}
        perturbation.perceive(at_time(tokens, time), output, state)
        assert_close(state, before, rtol=0, atol=0, equal_nan=True)


@variants
def test_an_onset_postpones_what_would_begin_at_once(name, options):
    options = {**options, "end": None}
    immediate, postponed = (
        build(name, severity=0.7, **{**options, "onset": onset}) for onset in (0, 3)
    )
    tokens = make_tokens(0)  # at rest, so that only the time differs
    ahead, behind = play(immediate, tokens, steps=5), play(postponed, tokens, steps=8)
    assert all(map(same, ahead, behind[3:]))


@each_perturbation
def test_only_the_agents_named_are_perturbed(name):
    tokens = make_tokens(0)
    partial, full = (
        build(name, severity=0.7, agents=agents) for agents in ([1], [0, 1])
    )
    partial_states = list(states(partial, tokens, moves=True))
    full_outputs = play(full, tokens, moves=True)
    for time, (output, state) in enumerate(partial_states):
        true = at_time(tokens, time)
        first, second = ((slice(None), slice(i, i + 1)) for i in (0, 1))
        assert is_unperturbed(output.at(first), true.at(first))
        assert same(output.at(second), full_outputs[time].at(second))
        for mask in partial.perceive(true, output, state).marks().values():
            assert not mask[:, 0].any()
    assert not same(partial_states[-1][0], at_time(tokens, 4))


@pytest.mark.parametrize(
    ("options", "key", "expected", "actual"),
    [
        ({"onset": 5, "end": 5}, "end", "after the onset 5", "got 5"),
        ({"onset": -1}, "onset", ">= 0", "got -1"),
        ({"agents": []}, "agents", "at least one", "got []"),
        ({"agents": [0, -1]}, "agents", "integer >= 0", "got [0, -1]"),
        ({"groups": []}, "groups", "at least one", "got []"),
        ({"groups": "prey"}, "groups", "a list", "got 'prey'"),
    ],
)
def test_wrong_options_are_refused(options, key, expected, actual):
    with pytest.raises(InputError) as refusal:
        build("occlude", **options)
    message = str(refusal.value)
    assert message.startswith(f"perturbation.{key}: expected")
    assert expected in message
    assert actual in message


def tag(**options: Any) -> Rollout:
    env = make_batched_env("simple_tag", 2, max_steps=6, **TAG)
    policies = {n: RandomPolicy(g.action_space) for n, g in env.groups.items()}
    perturbation = make_perturbation("occlude", severity=1.0, **options)
    return Rollout(env, policies, perturbation=perturbation)


def test_only_the_groups_named_are_perturbed():
    env = tag().env
    first, second = env.groups
    rollout = tag(groups=[second])
    plain = rollout.env.observe()
    assert same(rollout.tokens[first], plain[first])
    assert not same(rollout.tokens[second], plain[second])
    assert rollout.perturbation_states.keys() == {second}
    rollout.steps(8)
    assert same(rollout.tokens[first], rollout.env.observe()[first])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"onset": 6}, "perturbation.onset: expected a step below .* 6, got 6"),
        ({"groups": ["x"]}, "perturbation.groups: expected some of .*, got x"),
        ({"agents": [0, 99]}, r"perturbation.agents: expected .* got \[0, 99\]"),
    ],
)
def test_what_an_env_lacks_is_refused(options, message):
    with pytest.raises(UnfitTokensError, match=message):
        tag(**options)


def test_a_wrapped_env_perturbs_the_agents_named():
    plain = make_env("simple_tag", **TAG)
    names = list(plain.possible_agents)
    # The last agent is of the second group, and alone in it.
    group = names[-1].rpartition("_")[0]
    perturbation = {"name": "duplicate", "severity": 1.0, "groups": [group]}
    wrapped = PerturbedParallelEnv(make_env("simple_tag", **TAG), perturbation)
    (first, _), (perturbed, _) = plain.reset(seed=3), wrapped.reset(seed=3)
    for agent in names:
        is_larger = len(perturbed[agent]["types"]) > len(first[agent]["types"])
        assert is_larger == (agent.rpartition("_")[0] == group)
        assert wrapped.observation_space(agent).contains(perturbed[agent])
