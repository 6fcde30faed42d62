"""Perturbations: identity at 0, their own streams, and what each one promises."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.perturbed import (
    ACTION_VARIANTS,
    SPEC,
    VARIANTS,
    at_time,
    bits,
    build,
    keys,
    make_tokens,
    play,
    present_bag,
    same,
    seeds,
    severities,
    states,
    variants,
)
from marl_pool.networks.set_network import SetNetwork
from marl_pool.perturbations import PERTURBATIONS, make_perturbation, perturbation_names
from marl_pool.perturbations.sampling import uniform_like
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError

# All of them


def test_every_registered_perturbation_is_tried_here():
    assert {name for name, _ in VARIANTS + ACTION_VARIANTS} == set(PERTURBATIONS)
    assert perturbation_names() == sorted(PERTURBATIONS)


@variants
@given(seed=seeds)
def test_severity_0_is_the_identity_bit_for_bit(name, options, seed):
    tokens = make_tokens(seed)
    tokens.features[0, 0, 0, 0] = -0.0
    perturbation = build(name, severity=0.0, **options)
    for time, output in enumerate(play(perturbation, tokens, moves=True)):
        assert same(output, at_time(tokens, time))


@variants
def test_it_leaves_the_envs_own_tensors_alone(name, options):
    tokens = make_tokens(0)
    before = tokens.map(torch.clone)
    play(build(name, severity=1.0, **options), tokens)
    assert same(tokens, before)


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
def test_its_memory_can_be_taken_apart_by_rows(name, options):
    tokens, perturbation = make_tokens(0), build(name, severity=0.7, **options)
    state = perturbation.start(tokens, keys())
    rows = torch.tensor([2, 0])
    state_part = {key: tensor[rows] for key, tensor in state.items()}
    for time in range(4):
        clean = at_time(tokens, time)
        output, state = perturbation(clean, state)
        output_part, state_part = perturbation(clean.at(rows), state_part)
        assert same(output.at(rows), output_part)


@pytest.mark.parametrize(
    "name", ["bias", "confuse", "duplicate", "occlude", "rewire", "scale", "shuffle"]
)
def test_every_k_steps_or_at_reset_only(name):
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


@variants
@pytest.mark.parametrize("severity", [-0.1, 1.1, float("nan")])
def test_a_severity_out_of_range_is_refused(name, options, severity):
    with pytest.raises(InputError, match=r"severity: expected a number in \[0, 1\]"):
        build(name, severity=severity, **options)


def test_bad_options_are_refused():
    with pytest.raises(InputError, match=r"unknown perturbation 'shufle'.*'shuffle'"):
        make_perturbation("shufle")
    with pytest.raises(InputError, match="every: expected .* >= 1 or null, got 0"):
        build("shuffle", every=0)
    with pytest.raises(InputError, match=r"held: expected null where .*got 3 and 2"):
        build("shuffle", every=2, held=3)
    with pytest.raises(
        InputError, match=r"held: expected an integer in .* or null, got -1"
    ):
        build("shuffle", held=-1)
    with pytest.raises(InputError, match="mode: expected drop or zero, got 'cut'"):
        build("occlude", mode="cut")
    with pytest.raises(InputError, match="scale: expected a number >= 0, got -1.0"):
        build("jitter", scale=-1.0)
    with pytest.raises(InputError, match="count: expected an integer >= 1, got 0"):
        build("inject", count=0)
    with pytest.raises(InputError, match="spread: expected a number >= 0, got -1.0"):
        build("inject", spread=-1.0)


@variants
def test_it_reaches_the_policy(name, options):
    """Each changes a network's output, but the shuffle of an invariant one's."""
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
    if name == "shuffle":
        assert not same(output, tokens)
        assert change.max() < 1e-12
    else:
        assert change.min() > 1e-6


# Shuffle and rewire


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


# Occlude


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


def test_more_occlusion_takes_the_same_tokens_and_more():
    tokens = make_tokens(0)
    mild, severe = (
        play(build("occlude", severity=s), tokens)[0].padding for s in (0.3, 0.8)
    )
    assert (mild <= severe).all()
    assert mild.sum() < severe.sum()


# Jitter


def test_successive_draws_share_no_number():
    turns = torch.arange(4).repeat(3, 1)
    draws = [uniform_like(keys(), turn, (2, 5)) for turn in turns.T]
    assert torch.stack(draws).unique().numel() == 4 * 3 * 2 * 5


def test_jitter_is_gaussian_and_fresh_at_each_step():
    tokens = make_tokens(0, envs=400, places=16)
    errors = torch.stack(
        [
            output.features - tokens.features
            for output in play(
                build("jitter", severity=0.5, scale=3.0), tokens, steps=3
            )
        ]
    )[:, ~tokens.padding & (tokens.types != SELF_TYPE)]
    assert abs(float(errors.mean())) < 0.01
    assert float(errors.std()) == pytest.approx(1.5, rel=0.01)
    # Gaussian: the fourth moment is three times the variance squared.
    kurtosis = (errors**4).mean() / errors.var() ** 2
    assert float(kurtosis) == pytest.approx(3.0, abs=0.1)
    across = torch.corrcoef(errors.flatten(1))
    assert (across - torch.eye(3)).abs().max() < 0.02


def test_jitter_spares_self_by_default():
    tokens = make_tokens(0)
    self_mask = tokens.types == SELF_TYPE
    output = play(build("jitter", severity=1.0), tokens)[0]
    assert torch.equal(output.features[self_mask], tokens.features[self_mask])
    for options in ({"protect_self": False}, {"has_self": False}):
        output = play(build("jitter", severity=1.0, **options), tokens)[0]
        assert (output.features[self_mask] != tokens.features[self_mask]).all()


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


def test_jitter_on_an_image_is_in_units_of_its_range():
    images = torch.full((3, 2, 50, 40), 128, dtype=torch.uint8)
    types = torch.ones(3, 2, 50, dtype=torch.int64)
    tokens = Tokens(images, types, torch.zeros_like(types, dtype=torch.bool))
    (output,) = play(build("jitter", severity=0.1), tokens, steps=1)
    errors = output.features.float() - 128
    assert float(errors.std()) == pytest.approx(25.5, rel=0.03)
    assert abs(float(errors.mean())) < 1
