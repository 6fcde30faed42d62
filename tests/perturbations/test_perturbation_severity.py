"""Sampled and growing severities, nested selections, and protected tokens."""

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
    keys,
    make_tokens,
    play,
    same,
    seeds,
    severities,
    states,
    variants,
)
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.base import BatchedEnv
from marl_pool.options.signatures import show
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError

PAIR = [0.2, 0.9]


def first_slots(tokens: Tokens, places: int) -> Tokens:
    """The first slots."""
    return tokens.map(lambda part: part[:, :, :places])


# A severity for each environment


@variants
@given(seed=seeds)
def test_each_env_sees_what_its_own_severity_does(name, options, seed):
    tokens = make_tokens(seed)
    perturbation = build(name, severity=PAIR, **options)
    batch = play(perturbation, tokens, moves=True, seed=seed)
    _, state = next(states(perturbation, tokens, seed=seed))
    for env, severity in enumerate(state["severity"].tolist()):
        assert PAIR[0] < severity < PAIR[1]
        row = slice(env, env + 1)
        plain = build(name, severity=severity, **options)
        for output, expected in zip(
            batch,
            play(plain, tokens.at(row), moves=True, seed=seed, first=env),
            strict=True,
        ):
            places = expected.num_tokens
            assert same(first_slots(output.at(row), places), expected)
            assert output.padding[row, :, places:].all()


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


@variants
def test_a_pair_keeps_the_number_of_tokens_fixed(name, options):
    tokens = make_tokens(0)
    counts = {
        output.num_tokens
        for severity in ([0.0, 0.9], [0.5, 0.9], 0.9)
        for output in play(build(name, severity=severity, **options), tokens)
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    "severity",
    [
        [0.5],
        [0.6, 0.2],
        [0.0, 1.1],
        [-0.1, 0.5],
        [0.0, float("nan")],
        ["0", "1"],
        [0.0, None],
    ],
)
def test_a_wrong_pair_is_refused(severity):
    with pytest.raises(
        InputError, match=r"severity: expected .*\[low, high\].* got \["
    ):
        build("occlude", severity=severity)
    with pytest.raises(InputError, match="ramp: expected .* >= 1 or null, got 0"):
        build("occlude", ramp=0)


@pytest.mark.parametrize("severity", ["x", "0.5", None, True, {}, np.ones(2)])
def test_what_is_no_number_is_refused(severity):
    with pytest.raises(InputError) as refusal:
        build("occlude", severity=severity)
    assert str(refusal.value) == (
        "perturbation.severity: expected a number in [0, 1], or two: [low, high], "
        f"got {show(severity)}"
    )


def test_numbers_of_other_libraries_are_numbers():
    half = build("occlude", severity=np.float32(0.5))
    assert (half.low, half.high) == (0.5, 0.5)
    any_share = build("occlude", severity=(0, np.float64(1.0)))
    assert (any_share.low, any_share.high) == (0, 1.0)


# Ramps


@variants
def test_sampled_severity_0_changes_nothing_bit_for_bit(name, options):
    tokens = make_tokens(0)
    tokens.features[0, :, 1] = -0.0
    perturbation = build(name, severity=0.8, ramp=4, **options)
    episodes = torch.tensor([0, 2, 4])
    state = perturbation.start(tokens, keys(), episodes=episodes)
    assert state["severity"].tolist() == [0.0, 0.4, 0.8]
    for time in range(5):
        clean = at_time(tokens, time)
        output, state = perturbation(clean, state)
        first_row, last_row = slice(0, 1), slice(2, 3)
        assert same(first_slots(output, 9).at(first_row), clean.at(first_row))
        assert output.padding[first_row, :, 9:].all()
    assert not same(output.at(last_row), clean.at(last_row))


@given(severity=severities, ramp=st.integers(1, 60), played=st.integers(0, 100))
def test_a_ramp_grows_linearly_and_stays(severity, ramp, played):
    tokens = make_tokens(0)
    ramped: Any = build("occlude", severity=[0.0, severity], ramp=ramp)
    steady: Any = build("occlude", severity=[0.0, severity])
    partial = ramped.start(tokens, keys(), episodes=torch.full((3,), played))[
        "severity"
    ]
    full = steady.start(tokens, keys())["severity"]
    torch.testing.assert_close(partial, full * min(played / ramp, 1))


# What larger severities and protection promise


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


@variants
@given(seed=seeds, protect=st.booleans())
def test_the_own_token_is_protected_or_not(name, options, seed, protect):
    if name == "inject":
        return  # it touches no token at all
    tokens = make_tokens(seed)
    options = {**options, "protect_self": protect}
    options.pop("among", None)
    options.pop("features", None)
    perturbation = build(name, severity=1.0, **options)
    output, clean = play(perturbation, tokens, moves=True)[-1], at_time(tokens, 4)
    self_mask = (output.types == SELF_TYPE) & ~output.padding
    first = output.at((slice(None), slice(None), slice(0, 1)))
    kept = torch.equal(self_mask.sum(-1), torch.ones_like(self_mask.sum(-1)))
    kept &= torch.equal(first.features, clean.features[:, :, :1])
    kept &= bool(self_mask[..., 0].all())
    assert kept == protect


@variants
def test_what_lies_under_padding_is_never_seen(name, options):
    """Tokens come and go, and where there is none, features are NaN."""
    generator = torch.Generator().manual_seed(0)
    tokens = make_tokens(0)
    clean = tokens.features.nan_to_num()
    perturbation = build(name, severity=0.7, **options)
    state = perturbation.start(tokens, keys())
    for _ in range(12):
        output, state = perturbation(tokens, state)
        assert torch.isfinite(output.features[~output.padding]).all()
        padding = torch.rand(tokens.padding.shape, generator=generator) < 0.3
        padding[..., 0] = False
        clean = clean + 1
        features = clean.masked_fill(padding[..., None], torch.nan)
        tokens = Tokens(features, tokens.types, padding)


# In the loop


class Plain(Perturbation):
    """An identity without a ramp that records the episodes at each start."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[list[int]] = []

    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: Any = None,
        where: Any = None,
        episodes: Tensor | None = None,
    ) -> dict[str, Tensor]:
        assert episodes is not None
        self.played.append(episodes.tolist())
        return {"keys": keys}

    def __call__(self, tokens: Tokens, state: Any) -> tuple[Tokens, Any]:
        return tokens, state


def centroid(num_envs: int = 4, first_env: int = 0, **options: Any) -> BatchedEnv:
    return make_batched_env(
        "simple_centroid",
        num_envs,
        counts="2-3-4",
        max_steps=5,
        first_env=first_env,
        **options,
    )


def in_the_loop(
    name: str, options: dict[str, Any], severity: Any, env: BatchedEnv | None = None
) -> Rollout:
    env = env or centroid()
    group = env.groups["agent"]
    extra = {"inject": {"token_type": "signal"}}.get(name, {})
    perturbation = make_perturbation(
        name, specs=[group.tokens], severity=severity, **{**extra, **options}
    )
    policy = {"agent": RandomPolicy(group.action_space)}
    return Rollout(env, policy, perturbation=perturbation)


@variants
def test_the_policy_sees_it_and_the_env_does_not(name, options):
    clean, perturbed = (in_the_loop(name, options, severity) for severity in (0, 0.9))
    before, after = (rollout.steps(5)["agent"] for rollout in (clean, perturbed))
    assert torch.equal(before.rewards, after.rewards)
    for clean_part, perturbed_part in zip(
        clean.env.observe()["agent"].parts,
        perturbed.env.observe()["agent"].parts,
        strict=True,
    ):
        assert torch.equal(clean_part, perturbed_part)
    assert not same(before.tokens.at(4), after.tokens.at(4))


@variants
def test_it_changes_what_a_sensitive_policy_reaches(name, options):
    """The heuristic follows the signal; a shuffle is all the same to it."""
    returns = []
    for severity in (0.0, 0.8):
        env = centroid(16, dtype=torch.float64)
        group = env.groups["agent"]
        extra = {"inject": {"token_type": "signal"}}.get(name, {})
        options = {**extra, **options}
        if options.get("among") == ["agent", "noise"]:
            options["among"] = ["agent", "signal"]
        if name in ("bias", "jitter", "scale"):
            options.pop("features", None)
        perturbation = make_perturbation(
            name, specs=[group.tokens], severity=severity, **options
        )
        policy = {"agent": make_heuristic("simple_centroid", group)}
        returns.append(
            Rollout(env, policy, perturbation=perturbation).episodes().returns
        )
    clean, perturbed = (group_returns["agent"] for group_returns in returns)
    change = (clean - perturbed).abs().max()
    assert change < 1e-12 if name == "shuffle" else change > 1e-4


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


RAMPED: dict[str, Any] = {"severity": [0.2, 1.0], "ramp": 3}


@variants
def test_a_ramp_goes_on_exactly_where_a_state_was_taken(name, options):
    options = {**options, "ramp": 3}
    first = in_the_loop(name, options, RAMPED["severity"])
    first.steps(7)
    state = first.state_dict()
    expected = first.steps(9)["agent"].tokens
    for _ in range(2):  # a state may be used twice
        second = in_the_loop(name, options, RAMPED["severity"])
        second.load_state_dict(state)
        assert same(second.steps(9)["agent"].tokens, expected)


@variants
def test_envs_of_a_batch_draw_what_they_draw_alone(name, options):
    options = {**options, "ramp": 3}
    together = in_the_loop(name, options, RAMPED["severity"]).steps(12)["agent"].tokens
    for number in range(4):
        env = centroid(1, number)
        alone = in_the_loop(name, options, RAMPED["severity"], env)
        expected = together.at((slice(None), slice(number, number + 1)))
        assert same(alone.steps(12)["agent"].tokens, expected)


@variants
def test_envs_can_be_dropped_in_mid_episode(name, options):
    rollout = in_the_loop(name, options, [0.2, 1.0])
    reference = in_the_loop(name, options, [0.2, 1.0])
    rows = torch.tensor([3, 1])
    for running in (rollout, reference):
        running.steps(2)
    rollout._select(rows)
    rollout._observe()
    reference._observe()
    assert same(rollout.tokens["agent"], reference.tokens["agent"].at(rows))


def test_a_perturbation_without_a_ramp_receives_the_episodes_too():
    env, perturbation = centroid(), Plain()
    policy = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    Rollout(env, policy, perturbation=perturbation).steps(12)
    assert perturbation.played == [[number] * 4 for number in range(3)]
