"""Properties of single perturbations: order, occlusion, jitter, ramps and windows."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.perturbed import (
    at_time,
    build,
    centroid,
    first_slots,
    in_the_loop,
    keys,
    make_tokens,
    play,
    present_bag,
    same,
    seeds,
    severities,
    states,
)
from marl_pool.api.perturb import PerturbedParallelEnv
from marl_pool.envs import make_batched_env, make_env
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.sampling import uniform_like
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.utils.errors import UnfitTokensError


@pytest.mark.parametrize(
    "name", ["bias", "confuse", "duplicate", "occlude", "rewire", "scale", "shuffle"]
)
def test_resampled_every_k_steps_or_only_at_reset(name):
    tokens = make_tokens(0, places=20)
    held = play(build(name, severity=0.5), tokens, steps=7)
    assert all(same(output, held[0]) for output in held)
    refreshed = play(build(name, severity=0.5, every=3), tokens, steps=7)
    changed = [not same(a, b) for a, b in itertools.pairwise(refreshed)]
    assert changed == [False, False, True, False, False, True]
    assert same(refreshed[0], held[0])


@pytest.mark.parametrize("severity", [0.0, 0.5, 1.0])
def test_a_held_shuffle_is_the_same_everywhere(severity):
    twin = make_tokens(0, places=20).at((slice(0, 1), slice(0, 1)))
    tokens = twin.map(lambda tensor: tensor.expand(3, 2, *tensor.shape[2:]).clone())
    held = build("shuffle", severity=severity, held=3)
    (first, *repeats) = [
        output
        for options in ({}, {"seed": 1}, {"first": 9}, {"episode": 1})
        for output in play(held, tokens, **options)
    ]
    assert all(same(output, first) for output in repeats)
    assert same(first.at((0, 0)), first.at((2, 1)))
    assert same(first, tokens) == (severity == 0)
    (variant,) = play(build("shuffle", severity=severity, held=4), tokens, steps=1)
    assert same(variant, first) == (severity == 0)


@given(seed=seeds, severity=severities)
def test_shuffle_moves_whole_tokens(seed, severity):
    tokens = make_tokens(seed)
    for output, state in states(build("shuffle", severity=severity, every=1), tokens):
        assert present_bag(output) == present_bag(tokens)
        places = state["origin"].sort(-1).values
        assert torch.equal(places, torch.arange(9).expand_as(places))
        moved = state["origin"] != torch.arange(9)
        assert moved.sum(-1).max() <= round(severity * 9)


@given(seed=seeds, severity=severities)
def test_rewire_moves_features_and_keeps_types(seed, severity):
    tokens = make_tokens(seed)
    present = ~tokens.padding
    for output, state in states(build("rewire", severity=severity, every=1), tokens):
        assert torch.equal(output.types, tokens.types)
        assert torch.equal(output.padding, tokens.padding)
        # The NaN under padding stays there.
        assert torch.isfinite(output.features[present]).all()
        sums = [t.features.nan_to_num().sum(-2) for t in (output, tokens)]
        torch.testing.assert_close(*sums)
        moved = state["origin"] != torch.arange(9)
        most = (present.sum(-1) * severity).round()
        assert (moved.sum(-1) <= most).all()


def test_rewire_crosses_most_wires_at_severity_1():
    tokens = make_tokens(0, envs=64, places=16)
    _, state = next(states(build("rewire"), tokens))
    moved = (state["origin"] != torch.arange(16))[~tokens.padding]
    # A random permutation of n leaves one element in place on average.
    assert 0.8 < moved.float().mean() < 1


def test_a_wire_to_a_token_that_vanished_is_dead():
    tokens = make_tokens(0)._replace(padding=torch.zeros(3, 2, 9, dtype=torch.bool))
    perturbation = build("rewire")
    state = perturbation.start(tokens, keys())
    absent = tokens.padding.clone()
    absent[..., 4] = True
    output, state = perturbation(tokens._replace(padding=absent), state)
    assert torch.equal(output.padding, absent | (state["origin"] == 4))


def test_all_permutations_are_equally_likely():
    tokens = make_tokens(0, envs=6000, agents=1, places=3)
    _, state = next(states(build("shuffle"), tokens))
    code = (state["origin"][:, 0] * torch.tensor([9, 3, 1])).sum(-1)
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 6
    # Each count has mean 1000 and standard deviation 29.
    assert (counts - 1000).abs().max() < 130


@given(seed=seeds, severity=severities, mode=st.sampled_from(["drop", "zero"]))
def test_occlusion_takes_the_exact_count_and_spares_self(seed, severity, mode):
    tokens = make_tokens(seed)
    free = ~tokens.padding & (tokens.types != SELF_TYPE)
    for output in play(build("occlude", severity=severity, mode=mode), tokens):
        zeroed = (output.features == 0).all(-1) & ~output.padding
        missing = (output.padding & ~tokens.padding) if mode == "drop" else zeroed
        counts, removed = (mask.sum(-1).flatten().tolist() for mask in (free, missing))
        assert removed == [round(severity * count) for count in counts]
        assert not (missing & ~free).any()
        if mode == "zero":
            assert torch.equal(output.padding, tokens.padding)
        kept = ~missing[..., None] & ~tokens.padding[..., None]
        assert torch.equal(
            output.features.masked_fill(~kept, 0), tokens.features.masked_fill(~kept, 0)
        )


def test_occlusion_of_all_takes_self_only_if_told():
    tokens = make_tokens(0)
    assert play(build("occlude", severity=1.0), tokens)[0].padding[..., 1:].all()
    assert not play(build("occlude", severity=1.0), tokens)[0].padding[..., 0].any()
    for options in ({"protect_self": False}, {"has_self": False}):
        output = play(build("occlude", severity=1.0, **options), tokens)[0]
        assert output.padding.all()


def test_successive_draws_share_no_number():
    turns = torch.arange(4).repeat(3, 1)
    draws = [uniform_like(keys(), turn, (2, 5)) for turn in turns.T]
    assert torch.stack(draws).unique().numel() == 4 * 3 * 2 * 5


def test_jitter_is_gaussian_and_fresh_at_each_step():
    tokens = make_tokens(0, envs=400, places=16)
    outputs = play(build("jitter", severity=0.5, scale=3.0), tokens, steps=3)
    errors = torch.stack([output.features - tokens.features for output in outputs])
    errors = errors[:, ~tokens.padding & (tokens.types != SELF_TYPE)]
    assert abs(float(errors.mean())) < 0.01
    assert float(errors.std()) == pytest.approx(1.5, rel=0.01)
    # Gaussian: the fourth moment is three times the variance squared.
    kurtosis = (errors**4).mean() / errors.var() ** 2
    assert float(kurtosis) == pytest.approx(3.0, abs=0.1)
    across = torch.corrcoef(errors.flatten(1))
    assert (across - torch.eye(3)).abs().max() < 0.02


def test_jitter_on_an_image_stays_an_image():
    tokens = make_tokens(0)
    images = (tokens.features.nan_to_num().abs() * 120).clamp(max=255).byte()
    jitter = build("jitter", severity=1.0, scale=50 / 255, has_self=False)
    output = play(jitter, tokens._replace(features=images))[0]
    assert output.features.dtype == torch.uint8
    assert not torch.equal(output.features, images)
    # What would fall below 0 is cut there; it doesn't wrap round to 255.
    dark = images < 5
    assert output.features[dark].float().mean() < 50


@given(low=st.floats(0, 1), high=st.floats(0, 1))
def test_severities_are_uniform_between_their_bounds(low, high):
    low, high = sorted((low, high))
    tokens = make_tokens(0, envs=2000, agents=1, places=2)
    _, state = next(states(build("occlude", severity=[low, high]), tokens))
    sampled = state["severity"]
    assert sampled.min() >= low
    assert sampled.max() <= high
    # Each share has mean 1/2 and, of 2000, a standard error of 0.0065.
    if high - low > 1e-3:
        shares = (sampled - low) / (high - low)
        assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
        assert float((shares < 0.25).double().mean()) == pytest.approx(0.25, abs=0.05)


def test_numpy_severities_are_accepted():
    half = build("occlude", severity=np.float32(0.5))
    assert (half.low, half.high) == (0.5, 0.5)
    any_share = build("occlude", severity=(0, np.float64(1.0)))
    assert (any_share.low, any_share.high) == (0, 1.0)


@given(severity=severities, ramp=st.integers(1, 60), played=st.integers(0, 100))
def test_a_ramp_grows_linearly_and_stays(severity, ramp, played):
    tokens, bounds = make_tokens(0), [0.0, severity]
    ramped = build("occlude", severity=bounds, ramp=ramp)
    state = ramped.start(tokens, keys(), episodes=torch.full((3,), played))
    full = build("occlude", severity=bounds).start(tokens, keys())["severity"]
    torch.testing.assert_close(state["severity"], full * min(played / ramp, 1))


def touched_slots(name: str, tokens: Tokens, severity: float) -> Tensor:
    """The slots that a perturbation has changed, ``(num_envs, agents, N)`` bool."""
    output, state = list(states(build(name, severity=severity), tokens, moves=True))[-1]
    if name == "duplicate":
        copied = state["origin"][..., tokens.num_tokens :]
        one_hot = torch.nn.functional.one_hot(copied + 1, tokens.num_tokens + 1)
        return one_hot.sum(-2)[..., 1:] > 0
    clean = at_time(tokens, 4)
    moved = (output.features != clean.features).any(-1) & ~output.padding
    return moved | (output.types != clean.types) | (output.padding != clean.padding)


@pytest.mark.parametrize("name", ["confuse", "duplicate", "freeze", "occlude"])
@given(seed=seeds, pair=st.tuples(severities, severities))
def test_more_of_it_touches_the_same_tokens_and_more(name, seed, pair):
    tokens = make_tokens(seed)
    present = ~tokens.padding & (tokens.types != SELF_TYPE)
    mild, severe = (touched_slots(name, tokens, severity) for severity in sorted(pair))
    assert (mild <= severe).all()
    for severity, mask in zip(sorted(pair), (mild, severe), strict=True):
        expected = (present.sum(-1) * severity).round()
        assert torch.equal(mask.sum(-1), expected.long())
        assert not (mask & ~present).any()


@pytest.mark.parametrize("name", ["confuse", "occlude"])
@given(seed=seeds, severity=severities)
def test_the_count_follows_tokens_that_come_and_go(name, seed, severity):
    tokens, padding = make_tokens(seed), make_tokens(seed + 1).padding
    perturbation = build(name, severity=severity)
    state = perturbation.start(tokens, keys())
    clean = tokens._replace(padding=padding)
    output, _ = perturbation(clean, state)
    affected = (output.types != clean.types) | (output.padding != clean.padding)
    present = ~padding & (tokens.types != SELF_TYPE)
    expected = (present.sum(-1) * torch.tensor(severity).double()).round()
    assert torch.equal(affected.sum(-1), expected.long())
    assert not (affected & ~present).any()


def test_more_distractors_are_the_same_ones_and_more():
    tokens = make_tokens(0)
    few, many = (
        play(build("inject", severity=severity), tokens)[0] for severity in (0.5, 1.0)
    )
    assert few.num_tokens == 12
    assert same(few, first_slots(many, 12))


class Plain(Perturbation):
    """An identity without a ramp that records the episodes at each start."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[list[int]] = []

    def start(self, tokens, keys, state=None, where=None, episodes=None):
        assert episodes is not None
        self.played.append(episodes.tolist())
        return {"keys": keys}

    def __call__(self, tokens: Tokens, state: Any) -> tuple[Tokens, Any]:
        return tokens, state


@pytest.mark.parametrize("ramp", [1, 3])
def test_severities_grow_from_episode_to_episode(ramp):
    rollout = in_the_loop("occlude", {"ramp": ramp}, 1.0)
    tokens = rollout.steps(25)["agent"].tokens
    # Self, four of noise, another agent and three of signal: eight can be missing.
    missing = tokens.padding.sum(-1).view(5, 5, 4, 2)
    for episode in range(5):
        expected = round(8 * min(episode / ramp, 1))
        assert (missing[episode] == expected).all()


def test_a_rollout_may_have_episodes_behind_it():
    env = centroid()
    perturbation = make_perturbation("occlude", severity=1.0, ramp=4)
    policy = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    rollout = Rollout(env, policy, perturbation=perturbation, played=2)
    assert (rollout.tokens["agent"].padding.sum(-1) == 4).all()


def test_a_perturbation_without_a_ramp_receives_the_episodes_too():
    env, perturbation = centroid(), Plain()
    policy = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    Rollout(env, policy, perturbation=perturbation).steps(12)
    assert perturbation.played == [[number] * 4 for number in range(3)]


TAG: dict[str, Any] = {"counts": "2-2-1", "prey": "learned"}


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


def test_a_perturbation_that_covers_no_group_is_refused():
    perturbation = make_perturbation(
        "jitter", specs={"a": TokenSpec(4, 2, ("self", "other"))}, groups=["b"]
    )
    with pytest.raises(UnfitTokensError, match="groups: expected some of a, got b"):
        perturbation.validate_env({"a": 1, "b": 2}, 10)
