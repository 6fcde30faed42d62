"""The contract of perturbations: every perturbation × every shared property.

What each one promises beside it is in the other files.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from helpers.perturbed import (
    ACTION_VARIANTS,
    OBSERVED,
    SEEN_IN_LOOPS,
    SPEC,
    VARIANTS,
    at_time,
    bits,
    build,
    first_slots,
    in_loops,
    in_the_loop,
    keys,
    make_tokens,
    play,
    same,
    seeds,
    severities,
    states,
    variants,
)
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.signatures import show
from marl_pool.perturbations import PERTURBATIONS, perturbation_names
from marl_pool.perturbations.base import validate_perturbed
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError

PAIR, RAMPED = [0.2, 0.9], {"severity": [0.2, 1.0], "ramp": 3}
each_perturbation = pytest.mark.parametrize("name", OBSERVED)


def test_every_registered_perturbation_is_tried_here():
    variants = {name for name, _ in VARIANTS + ACTION_VARIANTS}
    assert variants == set(PERTURBATIONS), "see VARIANTS in tests/helpers/perturbed.py"
    assert perturbation_names() == sorted(PERTURBATIONS)


def is_unperturbed(output: Tokens, true: Tokens) -> bool:
    """Equal bit for bit, except for added padding."""
    original = output.map(lambda part: part[:, :, : true.num_tokens])
    return same(original, true) and bool(output.padding[:, :, true.num_tokens :].all())


@variants
@given(seed=seeds)
def test_severity_0_is_the_identity_bit_for_bit(name, options, seed):
    tokens = make_tokens(seed)
    tokens.features[0, 0, 0, 0] = -0.0
    perturbation = build(name, severity=0.0, **options)
    for time, output in enumerate(play(perturbation, tokens, moves=True)):
        assert same(output, at_time(tokens, time))


@variants
def test_input_tokens_are_not_modified_in_place(name, options):
    tokens = make_tokens(0)
    before = tokens.map(torch.clone)
    play(build(name, severity=1.0, **options), tokens)
    assert same(tokens, before)


@variants
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("severity", [1.0, PAIR])
def test_results_keep_their_dtypes(name, options, dtype, severity):
    if name == "inject" and dtype == torch.uint8:
        return  # it refuses images, which have no positions
    tokens = make_tokens(0)
    features = (tokens.features.nan_to_num() * 20 + 120).to(dtype)
    tokens = tokens._replace(features=features)
    for output in play(build(name, severity=severity, **options), tokens):
        validate_perturbed(build(name, **options), tokens, output)


@variants
@given(seed=seeds, severity=severities)
def test_same_keys_same_perturbation(name, options, seed, severity):
    tokens = make_tokens(seed)
    perturbation = build(name, severity=severity, **options)
    first, second = (play(perturbation, tokens, moves=True) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


@variants
@pytest.mark.parametrize("key_options", [{"seed": 1}, {"first": 9}, {"episode": 1}])
def test_other_seeds_envs_and_episodes_differ(name, options, key_options):
    tokens = make_tokens(0)
    # Only the severity of a delay is random.
    severity: Any = [0.0, 1.0] if name == "delay" else 0.5
    perturbation = build(name, severity=severity, **options)
    reference = play(perturbation, tokens, moves=True)[-1]
    variant = play(perturbation, tokens, moves=True, **key_options)[-1]
    assert not same(reference, variant)


@variants
@given(seed=seeds, severity=severities)
def test_a_row_is_the_same_alone_and_among_others(name, options, seed, severity):
    tokens = make_tokens(seed, envs=4)
    perturbation = build(name, severity=severity, **options)
    together = play(perturbation, tokens, moves=True)
    alone = play(perturbation, tokens.at(slice(2, 3)), moves=True, first=2)
    for batch, single in zip(together, alone, strict=True):
        assert same(batch.at(slice(2, 3)), single)


@variants
def test_agents_of_an_env_are_perturbed_apart(name, options):
    twins = make_tokens(0).at((slice(None), slice(0, 1)))
    twins = twins.map(lambda tensor: tensor.expand(-1, 2, *tensor.shape[2:]).clone())
    output = play(build(name, severity=0.5, **options), twins, moves=True)[-1]
    first, second = (output.at((slice(None), agent)) for agent in range(2))
    # All agents of an environment have the same delay.
    assert same(first, second) == (name == "delay")


@variants
def test_a_restart_touches_the_envs_that_begin_anew(name, options):
    tokens, perturbation = make_tokens(0), build(name, severity=0.7, **options)
    where = torch.tensor([False, True, False])
    state = perturbation.start(tokens, keys())
    for time in range(3):
        _, state = perturbation(at_time(tokens, time), state)
    fresh = perturbation.start(tokens, keys(episode=1))
    merged = perturbation.start(tokens, keys(episode=1), state, where)
    assert merged.keys() == state.keys()
    for part, tensor in merged.items():
        assert tensor.dtype == state[part].dtype
        assert torch.equal(bits(tensor[~where]), bits(state[part][~where]))
        assert torch.equal(bits(tensor[where]), bits(fresh[part][where]))
    assert not torch.equal(merged["steps"], state["steps"])


@variants
def test_state_can_be_indexed_by_rows(name, options):
    tokens, perturbation = make_tokens(0), build(name, severity=0.7, **options)
    state = perturbation.start(tokens, keys())
    rows = torch.tensor([2, 0])
    state_part = {key: tensor[rows] for key, tensor in state.items()}
    for time in range(4):
        clean = at_time(tokens, time)
        output, state = perturbation(clean, state)
        output_part, state_part = perturbation(clean.at(rows), state_part)
        assert same(output.at(rows), output_part)


@variants
def test_perturbations_change_network_outputs(name, options):
    """Each changes an invariant network's output, except for a shuffle of tokens."""
    network = SetNetwork(
        SPEC,
        encoder={"name": "transformer"},
        pooling={"name": "ada"},
        init_std=0.5,
        seed=0,
    ).double()
    tokens = make_tokens(1)
    tokens.padding[..., :4] = False
    tokens.types[..., :4] = torch.arange(4)
    tokens.features.nan_to_num_()
    output = play(build(name, severity=0.8, **options), tokens, moves=True)[-1]
    tokens = at_time(tokens, 4)
    with torch.no_grad():
        clean, perturbed = (network(t.flatten_batch()) for t in (tokens, output))
    change = (clean - perturbed).abs().amax(-1)
    if name == "shuffle" and "scope" not in options:
        assert not same(output, tokens)
        assert change.max() < 1e-12
    else:
        assert change.min() > 1e-6


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


@variants
def test_severity_range_keeps_the_number_of_tokens_fixed(name, options):
    tokens = make_tokens(0)
    counts = {
        output.num_tokens
        for severity in ([0.0, 0.9], [0.5, 0.9], 0.9)
        for output in play(build(name, severity=severity, **options), tokens)
    }
    assert len(counts) == 1


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
    """Tokens come and go, and features of absent ones are NaN."""
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


@pytest.mark.parametrize(("name", "options"), SEEN_IN_LOOPS)
def test_policy_sees_perturbed_tokens_and_env_state_is_clean(name, options):
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


@in_loops
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


@pytest.mark.parametrize("name", [*OBSERVED, *dict(ACTION_VARIANTS)])
@pytest.mark.parametrize(
    "severity", [-0.1, 1.1, float("nan"), "x", "0.5", None, True, {}, np.ones(2)]
)
def test_a_severity_is_a_number_in_range(name, severity):
    with pytest.raises(InputError) as refusal:
        build(name, severity=severity)
    expected = "a number in [0, 1], or two: [low, high], got "
    assert str(refusal.value) == (
        f"perturbation.severity: expected {expected}{show(severity)}"
    )
