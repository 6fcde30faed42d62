"""Sensor perturbations (freeze, calibration, delay, duplicate, confuse, images)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.perturbed import (
    NOISE,
    SPEC,
    TYPE_NAMES,
    at_time,
    build,
    keys,
    make_tokens,
    play,
    same,
    seeds,
    severities,
    states,
)
from marl_pool.perturbations import make_perturbation
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError

FEATURES = torch.arange(4)


def images(places: int = 50) -> Tokens:
    bytes_ = torch.full((3, 2, places, 40), 128, dtype=torch.uint8)
    types = torch.ones(3, 2, places, dtype=torch.int64)
    return Tokens(bytes_, types, torch.zeros_like(types, dtype=torch.bool))


# Bias, scale and jitter


def errors_of(name: str, tokens: Tokens, **options: Any) -> list[Tensor]:
    """Return errors added to readings, or logarithms of factors, for each step."""
    perturbation = build(name, protect_self=False, **options)
    errors = []
    for time, output in enumerate(play(perturbation, tokens, moves=True)):
        readings = at_time(tokens, time).features
        error = (
            (output.features / readings).log()
            if name == "scale"
            else output.features - readings
        )
        errors.append(error[~tokens.padding])
    return errors


@pytest.mark.parametrize(("name", "option"), [("bias", "scale"), ("scale", "spread")])
def test_calibration_errors_are_gaussian_and_constant(name, option):
    tokens = make_tokens(0, envs=400, places=16)
    first, *repeats = errors_of(name, tokens, severity=0.5, **{option: 0.8})
    for error in repeats:
        torch.testing.assert_close(error, first, rtol=0, atol=1e-3)
    assert abs(float(first.mean())) < 0.005
    assert float(first.std()) == pytest.approx(0.4, rel=0.02)
    kurtosis = (first**4).mean() / first.var() ** 2
    assert float(kurtosis) == pytest.approx(3.0, abs=0.1)
    # Features of a token have independent errors.
    across = torch.corrcoef(first.T)
    assert (across - torch.eye(4)).abs().max() < 0.05


def test_the_largest_factors_are_finite():
    tokens = make_tokens(0)
    output = play(build("scale", severity=1.0, spread=10.0), tokens)[0]
    assert output.features[~output.padding].isfinite().all()
    with pytest.raises(InputError, match=r"perturbation\.spread: .*10.* got 11"):
        build("scale", spread=11.0)


@pytest.mark.parametrize("name", ["bias", "scale", "jitter"])
@pytest.mark.parametrize("features", [[0], [1, 3], [2, 0]])
def test_only_the_chosen_features_are_disturbed(name, features):
    tokens = make_tokens(0)
    tokens.features[0, 0, 0] = -0.0
    perturbation = build(name, severity=1.0, features=features)
    unrestricted = build(name, severity=1.0)
    output, whole = play(perturbation, tokens)[0], play(unrestricted, tokens)[0]
    mask = torch.isin(FEATURES, torch.tensor(features))
    expected = torch.where(mask, whole.features, tokens.features)
    assert same(output, tokens._replace(features=expected))
    present = ~tokens.padding & (tokens.types != SELF_TYPE)
    changed = (output.features != tokens.features)[present]
    assert torch.equal(changed.all(0), mask)


def test_scale_leaves_what_reads_0():
    tokens = make_tokens(0)
    tokens.features[:, :, 1:5] = 0.0
    output = play(build("scale", severity=1.0), tokens)[0]
    assert (output.features[:, :, 1:5] == 0).all()


def test_errors_of_images_are_in_units_of_their_range():
    for name, expected in (("bias", 25.5), ("jitter", 25.5), ("scale", 12.9)):
        (output,) = play(build(name, severity=0.1), images(), steps=1)
        assert output.features.dtype == torch.uint8
        errors = output.features.float() - 128
        assert float(errors.std()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["bias", "jitter", "scale"])
def test_bytes_are_rounded_to_the_nearest(name):
    tokens = images()
    precise = tokens._replace(features=tokens.features / 255)
    perturbation = build(name, severity=0.1)
    for output, exact in zip(
        play(perturbation, tokens), play(perturbation, precise), strict=True
    ):
        levels = exact.features.clamp(0, 1) * 255
        # Halves may fall to either side: the two are computed in different orders.
        assert float((output.features - levels).abs().max()) <= 0.5 + 1e-4


# Freeze


@given(seed=seeds, severity=severities)
def test_frozen_sensors_repeat_their_reading(seed, severity):
    tokens = make_tokens(seed)
    perturbation = build("freeze", severity=severity)
    for time, (output, state) in enumerate(states(perturbation, tokens, moves=True)):
        clean, frozen = at_time(tokens, time), state["frozen"]
        expected = torch.where(frozen[..., None], tokens.features, clean.features)
        assert same(output, clean._replace(features=expected))


def test_a_frozen_reading_is_a_copy():
    tokens = make_tokens(0)
    buffer = tokens._replace(features=tokens.features.clone())
    perturbation = build("freeze", severity=1.0)
    state = perturbation.start(buffer, keys())
    buffer.features.add_(1.0)  # an environment that writes its next step in place
    output, state = perturbation(buffer, state)
    frozen = state["frozen"]
    assert torch.equal(output.features[frozen], tokens.features[frozen])


def test_frozen_sensors_are_redrawn_with_new_readings_every_k_steps():
    tokens = make_tokens(0)
    perturbation = build("freeze", severity=0.5, every=3)
    for time, (output, state) in enumerate(states(perturbation, tokens, 7, moves=True)):
        frozen = state["frozen"]
        readings = at_time(tokens, time - time % 3).features
        assert torch.equal(output.features[frozen], readings[frozen])


# Delay


@pytest.mark.parametrize("lag", [0, 1, 3, 4])
def test_readings_are_delayed_by_severity_times_steps(lag):
    tokens = make_tokens(0)
    self_mask = tokens.types == SELF_TYPE
    perturbation = build("delay", severity=lag / 4, steps=4)
    for time, output in enumerate(play(perturbation, tokens, 8, moves=True)):
        clean, delayed = at_time(tokens, time), at_time(tokens, max(time - lag, 0))
        expected = torch.where(self_mask[..., None], clean.features, delayed.features)
        assert same(output, clean._replace(features=expected))


def test_a_token_that_comes_back_begins_with_its_new_reading():
    tokens = make_tokens(0)._replace(padding=torch.zeros(3, 2, 9, dtype=torch.bool))
    tokens = tokens._replace(features=torch.zeros(3, 2, 9, 4))
    perturbation = build("delay", severity=0.5, steps=4)
    state = perturbation.start(tokens, keys())
    readings = []
    for time in range(8):
        absent = torch.zeros_like(tokens.padding)
        absent[..., 4] = 2 <= time < 4
        features = torch.full_like(tokens.features, float(time))
        features[absent] = torch.nan
        output, state = perturbation(Tokens(features, tokens.types, absent), state)
        assert torch.equal(output.padding, absent)
        readings.append(float(output.features[0, 0, 4, 0]))
    assert readings[:2] == [0, 0]
    assert readings[4:] == [4, 4, 4, 5]


# Duplicate


@given(seed=seeds, severity=severities)
def test_copies_follow_their_tokens(seed, severity):
    tokens = make_tokens(seed)
    present = ~tokens.padding & (tokens.types != SELF_TYPE)
    perturbation = build("duplicate", severity=severity)
    for time, (output, state) in enumerate(states(perturbation, tokens, moves=True)):
        clean = at_time(tokens, time)
        assert output.num_tokens == 9 + round(9 * severity)
        assert same(output.map(lambda part: part[:, :, :9]), clean)
        origin, used = state["origin"], ~output.padding
        assert (origin[..., :9] == torch.arange(9)).all()
        counts = used[..., 9:].sum(-1)
        assert torch.equal(counts, (present.sum(-1) * severity).round().long())
        for env in range(3):
            for agent in range(2):
                agent_index, copies = (env, agent), used[env, agent, 9:]
                places = origin[agent_index][9:][copies]
                assert len(set(places.tolist())) == len(places)
                for part, clean_part in zip(output.parts, clean.parts, strict=True):
                    assert torch.equal(
                        part[agent_index][9:][copies], clean_part[agent_index][places]
                    )


def test_a_copy_vanishes_with_its_token():
    tokens = make_tokens(0)._replace(padding=torch.zeros(3, 2, 9, dtype=torch.bool))
    perturbation = build("duplicate", severity=1.0)
    state = perturbation.start(tokens, keys())
    absent = tokens.padding.clone()
    absent[..., 4] = True
    output, state = perturbation(tokens._replace(padding=absent), state)
    copied = state["origin"][..., 9:]
    expected = (copied == 4) | (copied == -1)
    assert torch.equal(output.padding[..., 9:], expected)


# Confuse


@given(seed=seeds, protect=st.booleans(), has_self=st.booleans())
def test_another_type_but_never_self(seed, protect, has_self):
    tokens = make_tokens(seed)
    options = {"protect_self": protect, "has_self": has_self}
    output = play(build("confuse", severity=1.0, **options), tokens)[0]
    assert same(output._replace(types=tokens.types), tokens)
    changed = output.types != tokens.types
    free = ~tokens.padding
    if protect and has_self:
        free &= tokens.types != SELF_TYPE
    assert torch.equal(changed, free)
    assert 0 <= output.types.min() <= output.types.max() < 4
    if has_self:
        assert not (changed & (output.types == SELF_TYPE)).any()


@pytest.mark.parametrize(
    ("token_type", "other_types"), [(0, [1, 2, 3]), (1, [2, 3]), (3, [1, 2])]
)
def test_the_other_types_are_equally_likely(token_type, other_types):
    tokens = make_tokens(0, envs=2000, agents=1, places=3)
    types = torch.full_like(tokens.types, token_type)
    tokens = tokens._replace(types=types, padding=torch.zeros_like(tokens.padding))
    output = play(build("confuse", severity=1.0, protect_self=False), tokens)[0]
    kinds, counts = output.types.unique(return_counts=True)
    assert kinds.tolist() == other_types
    # Each share has a standard error below 0.0065.
    shares = counts / counts.sum()
    assert (shares - 1 / len(other_types)).abs().max() < 0.03


# Occlusion among some


@pytest.mark.parametrize(
    ("among", "kinds"),
    [
        ("signal", [2]),
        ("noise", [1, 3]),
        (["agent"], [1]),
        (["noise", "signal"], [2, 3]),
    ],
)
def test_occlusion_among_some_types(among, kinds):
    tokens = make_tokens(0)
    candidates = ~tokens.padding & torch.isin(tokens.types, torch.tensor(kinds))
    for severity in (0.5, 1.0):
        output = play(build("occlude", severity=severity, among=among), tokens)[0]
        missing = output.padding & ~tokens.padding
        assert not (missing & ~candidates).any()
        expected = (candidates.sum(-1) * severity).round().long()
        assert torch.equal(missing.sum(-1), expected)
    exposed = build("occlude", severity=1.0, among=among, protect_self=False)
    assert play(exposed, tokens)[0].padding[..., 0].all() == (among == "signal")


def test_the_first_type_may_be_noise_where_there_is_no_self():
    names = ("dust", "agent", "signal", "noise")
    kinds = TokenSpec(9, 4, names, signal_types=names[1:], has_self=False)
    occlude = make_perturbation(
        "occlude", specs={"agent": kinds}, severity=1.0, among="noise"
    )
    tokens = make_tokens(0)
    missing = play(occlude, tokens)[0].padding & ~tokens.padding
    assert torch.equal(missing, (tokens.types == 0) & ~tokens.padding)


BLIND = TokenSpec(9, 4, TYPE_NAMES)
PURE = TokenSpec(9, 4, TYPE_NAMES, signal_types=TYPE_NAMES)
PAIR = TokenSpec(9, 4, ("self", "frog"))
NO_SELF = TokenSpec(9, 4, TYPE_NAMES[1:], has_self=False)
IMAGE = TokenSpec(12, 40, ("patch",), has_self=False, dtype="uint8")


@pytest.mark.parametrize(
    ("name", "spec", "options", "message"),
    [
        ("occlude", BLIND, {"among": "signal"}, "among: expected any .*got signal"),
        ("occlude", BLIND, {"among": "noise"}, "among: expected any .*got noise"),
        ("occlude", PURE, {"among": "noise"}, "no type of tokens here is noise"),
        ("occlude", SPEC, {"among": ["frog"]}, "unknown perturbation.among 'frog'"),
        ("confuse", PAIR, {}, "at least two types beside self"),
        ("confuse", IMAGE, {}, "at least two types"),
        ("inject", IMAGE, {"token_type": "patch"}, "expected features with positions"),
        (
            *("inject", NO_SELF, {"token_type": "noise", "place": "near"}),
            "place: expected alike or far, .*got near",
        ),
    ],
)
def test_unfit_tokens_are_refused(name, spec, options, message):
    with pytest.raises(UnfitTokensError, match=message):
        make_perturbation(name, specs={"agent": spec}, **options)


@pytest.mark.parametrize("name", ["bias", "scale", "jitter"])
def test_features_that_tokens_have_not_are_refused_when_it_starts(name):
    with pytest.raises(InputError, match=r"features: expected numbers below 4.*\[4\]"):
        play(build(name, features=[4]), make_tokens(0))


# Distractors far and near


@pytest.mark.parametrize("numbers", [[0], [0, 1], [3, 1, 2]])
def test_far_distractors_are_at_the_stated_distance(numbers):
    tokens = make_tokens(0, envs=300, agents=1)
    tokens.types[..., 4] = NOISE
    tokens.padding[..., 4] = False
    tokens.features.nan_to_num_()
    perturbation = build("inject", place="far", distance=7.0, position_features=numbers)
    output, state = next(states(perturbation, tokens))
    anchors = state["anchor"][..., None].expand(-1, -1, -1, 4)
    displacements = output.features[..., 9:, :] - tokens.features.gather(-2, anchors)
    kept = [number for number in range(4) if number not in numbers]
    assert (displacements[..., kept] == 0).all()
    offsets = state["offset"]
    torch.testing.assert_close(displacements[..., numbers], offsets)
    lengths = torch.linalg.vector_norm(offsets, dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 7.0))
    # No direction is preferred: the mean of 1800 has a standard error below 0.17.
    assert offsets.mean((0, 1, 2)).abs().max() < 0.8


@given(seed=seeds)
def test_near_distractors_stand_around_the_observer(seed):
    tokens = make_tokens(seed)
    perturbation = build("inject", place="near", spread=0.05, relative=False)
    for time, output in enumerate(play(perturbation, tokens, moves=True)):
        observer = at_time(tokens, time).features[..., :1, :]
        offsets = output.features[..., 9:, :] - observer
        assert (offsets[..., :2].abs() <= 0.05 + 1e-6).all()
        assert (offsets[..., :2].abs() > 0).any()
        assert (offsets[..., 2:] == 0).all()
        assert (output.types[..., 9:] == NOISE).all()
        assert not output.padding[..., 9:].any()


# Images


@pytest.mark.parametrize(
    "name",
    ["bias", "delay", "duplicate", "freeze", "jitter", "occlude", "scale", "shuffle"],
)
def test_patches_of_bytes_stay_bytes(name):
    perturbation = make_perturbation(name, specs={"agent": IMAGE}, severity=0.5)
    tokens = images(12)
    state = perturbation.start(tokens, keys())
    for time in range(4):
        features = tokens.features + 20 * time
        clean = tokens._replace(features=features)
        output, state = perturbation(clean, state)
        assert output.features.dtype == torch.uint8
    # A shuffle shows in the order alone, which all patches being alike does not.
    assert same(output, clean) == (name == "shuffle")
