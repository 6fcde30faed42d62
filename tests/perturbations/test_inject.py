"""Inject: motion, type and place of distractors."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from scipy import stats
from torch import Tensor

from helpers.evaluated import levels
from helpers.perturbed import (
    NOISE,
    SPEC,
    TYPE_NAMES,
    build,
    keys,
    make_tokens,
    play,
    same,
    seeds,
    severities,
    states,
)
from marl_pool.api.perturb import perturb_env
from marl_pool.config import compose
from marl_pool.envs import make_batched_env, make_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import cases_of
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError


@given(seed=seeds, severity=severities)
def test_injection_appends_tokens_of_the_type(seed, severity):
    tokens = make_tokens(seed)
    added = round(severity * 6)
    for output, state in states(build("inject", severity=severity), tokens):
        assert output.num_tokens == 9 + added
        assert same(output.map(lambda tensor: tensor[:, :, :9]), tokens)
        assert (output.types[..., 9:] == NOISE).all()
        present = ~output.padding[..., 9:]
        assert torch.isfinite(output.features[..., 9:, :][present]).all()
        assert (state["origin"][..., 9:] == -1).all()
        assert torch.equal(state["origin"][0, 0, :9], torch.arange(9))


def moving_env(time: int) -> tuple[Tokens, Tensor]:
    """An observer that moves among landmarks (noise), and one that moves (signal)."""
    observer = torch.tensor([0.3, -0.1]) * time
    landmarks = torch.tensor([[1.0, 1.0], [-2.0, 0.5]])
    signal = torch.tensor([[0.0, 3.0]]) + 0.2 * time
    places = torch.cat([observer[None], landmarks, signal]) - observer
    velocities = torch.tensor([[0.0, 0], [-3, 1], [-3, 1], [-1, 3]])
    features = torch.cat([places, velocities], -1)[None, None]
    types = torch.tensor([SELF_TYPE, NOISE, NOISE, 2])[None, None]
    padding = torch.zeros_like(types, dtype=torch.bool)
    return Tokens(features, types, padding), observer


def test_distractors_stand_still_in_the_env():
    perturbation = build("inject", spread=0.5)
    state = perturbation.start(moving_env(0)[0], keys(1))
    places = []
    for time in range(4):
        tokens, observer = moving_env(time)
        output, state = perturbation(tokens, state)
        places.append(output.features[0, 0, 4:, :2] + observer)
        # Seen from the observer they move as the landmarks do.
        assert torch.equal(
            output.features[0, 0, 4:, 2:], torch.tensor([[-3.0, 1.0]]).expand(6, 2)
        )
    for place in places[1:]:
        torch.testing.assert_close(place, places[0])
    assert len(places[0].unique(dim=0)) == 6
    landmarks = torch.tensor([[1.0, 1.0], [-2.0, 0.5]])
    offsets = (places[0][:, None] - landmarks).abs().amax(-1).amin(-1)
    assert offsets.max() <= 0.5


def test_without_a_token_of_the_type_the_anchor_is_another_but_not_self():
    tokens, _ = moving_env(0)
    output = play(build("inject", token_type=1, spread=0.0), tokens)[0]
    candidates = tokens.features[0, 0, 1:]
    distances = (output.features[0, 0, 4:, None] - candidates).abs().amax(-1).amin(-1)
    assert (distances == 0).all()
    assert not output.padding.any()


def test_a_set_without_the_type_has_other_anchors_whatever_is_beside_it():
    tokens, _ = moving_env(0)
    alone = tokens._replace(types=torch.tensor([[[SELF_TYPE, 1, 1, 2]]]))
    beside = Tokens(*map(torch.cat, zip(tokens.parts, alone.parts, strict=True)))
    output = play(build("inject", spread=0.0), beside)[0]
    assert not output.padding.any()
    candidates = beside.features[1, 0, 1:]
    distances = (output.features[1, 0, 4:, None] - candidates).abs().amax(-1).amin(-1)
    assert (distances == 0).all()


@pytest.mark.parametrize("place", ["alike", "near"])
def test_offsets_are_uniform_in_the_whole_square(place):
    tokens, _ = moving_env(0)
    hidden = torch.tensor([[[False, False, True, True]]])  # one anchor for all
    copies = tokens._replace(padding=hidden).map(
        lambda part: part.expand(50, *part.shape[1:])
    )
    perturbation = build("inject", place=place, spread=0.4, count=32)
    anchor = tokens.features[0, 0, 1 if place == "alike" else 0, :2]
    offsets = play(perturbation, copies, steps=1)[0].features[:, 0, 4:, :2] - anchor
    for axis in offsets.flatten(0, 1).double().T:
        assert stats.kstest(axis.numpy(), "uniform", (-0.4, 0.8)).pvalue > 0.01


@pytest.mark.parametrize("name", ["mpev2_spread", "lbforaging", "simple_tag"])
def test_near_is_near_the_observer_whatever_its_own_token_says(name):
    env = make_batched_env(name, 3, seed=1)
    env.reset()
    group, tokens = next(iter(env.observe().items()))
    spec = env.groups[group].tokens
    options = {"place": "near", "spread": 0.25, "count": 4, "severity": 1.0}
    options |= {"token_type": spec.type_names[-1], "specs": {group: spec}}
    near, at_own = (
        play(make_perturbation("inject", relative=relative, **options), tokens)
        for relative in (True, False)
    )
    added = slice(spec.num_tokens, None)
    offsets = near[0].features[:, :, added][..., list(spec.positions)]
    assert offsets.abs().max() <= 0.25
    shifts = at_own[0].features[:, :, added][..., list(spec.positions)] - offsets
    observer = tokens.features[:, :, :1][..., list(spec.positions)]
    torch.testing.assert_close(shifts, observer.expand_as(shifts))


def test_without_any_anchor_the_distractors_are_padded():
    tokens, _ = moving_env(0)
    alone = tokens._replace(padding=torch.tensor([[[False, True, True, True]]]))
    output = play(build("inject"), alone)[0]
    assert output.padding[0, 0, 1:].all()
    assert torch.equal(output.padding[0, 0, :1], torch.tensor([False]))


def test_a_distractor_vanishes_with_its_anchor():
    tokens, _ = moving_env(0)
    perturbation = build("inject")
    state = perturbation.start(tokens, keys(1))
    occluded = tokens._replace(padding=torch.tensor([[[False, True, False, False]]]))
    output, state = perturbation(occluded, state)
    assert torch.equal(output.padding[0, 0, 4:], state["anchor"][0, 0] == 1)


def test_a_type_by_name():
    names = TYPE_NAMES
    perturbation = build("inject", token_type="noise", type_names=names)
    assert (play(perturbation, make_tokens(0))[0].types[..., 9:] == NOISE).all()
    with pytest.raises(
        InputError, match=r"'nois'.*agent, noise, self, signal.*'noise'"
    ):
        build("inject", token_type="nois", type_names=names)
    with pytest.raises(InputError, match="expected a number, or type_names"):
        build("inject", token_type="noise")
    with pytest.raises(InputError, match="token_type: expected 0 to 3, got 4"):
        build("inject", token_type=4, type_names=names)


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        (("self",), "noise"),
        (("self", "signal"), "noise"),
        (("self", "signal", "noise"), "agent"),
        ((), "expected a type.*got null"),
        (TYPE_NAMES, "no type of noise.*choose from self, agent"),
    ],
)
def test_noise_is_injected_where_no_type_is_named(signal, expected):
    spec = TokenSpec(9, 4, TYPE_NAMES, signal_types=signal, positions=(0, 1))
    if expected in TYPE_NAMES:
        output = play(
            make_perturbation("inject", specs={"agent": spec}), make_tokens(0)
        )[0]
        assert (output.types[..., 9:] == TYPE_NAMES.index(expected)).all()
    else:
        with pytest.raises(UnfitTokensError, match=f"token_type: .*{expected}"):
            make_perturbation("inject", specs={"agent": spec})


HEN = TokenSpec(9, 4, ("self", "noise"), signal_types=("self",), positions=(0, 1))
FOX = TokenSpec(5, 4, ("self", "noise"), has_self=False, positions=(0, 1))
EGG = TokenSpec(5, 3, ("self", "wall"))


def test_every_group_has_a_perturbation_that_fits_its_tokens():
    specs = {"hen": HEN, "chick": HEN, "fox": FOX}
    occlude = make_perturbation("occlude", specs=specs, severity=1.0)
    assert occlude.for_group("hen") is occlude.for_group("chick") is occlude
    assert occlude.for_group("unknown") is occlude
    for group, lost in (("hen", False), ("fox", True)):
        padding = play(occlude.for_group(group), make_tokens(0))[0].padding
        assert bool(padding[..., 0].any()) == lost


def test_options_must_fit_the_covered_groups_only():
    specs = {"hen": HEN, "egg": EGG}
    with pytest.raises(UnfitTokensError, match="token_type .*, in group 'egg'"):
        make_perturbation("inject", specs=specs, token_type="noise")
    for groups in (["hen"], ["hen", "unknown"]):
        inject = make_perturbation(
            "inject", specs=specs, groups=groups, token_type="noise"
        )
        assert (play(inject, make_tokens(0))[0].types[..., 9:] == 1).all()


def test_groups_that_it_was_not_made_for():
    occlude = make_perturbation("occlude", specs={"fox": FOX})
    message = "perturbation: expected specs of some of the groups agent, got fox"
    env = make_batched_env("simple_centroid", 2)
    policies = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    with pytest.raises(UnfitTokensError, match=message):
        Rollout(env, policies, perturbation=occlude)
    with pytest.raises(UnfitTokensError, match=message):
        perturb_env(make_env("simple_centroid"), occlude)


def test_specs_without_their_groups():
    message = "specs: expected a mapping of groups to TokenSpec, got list"
    with pytest.raises(InputError, match=message):
        make_perturbation("inject", specs=[HEN])


@pytest.mark.parametrize("numbers", [[4], [0, 9]])
def test_positions_that_the_features_cannot_hold(numbers):
    message = r"position_features: expected numbers below 4, got "
    with pytest.raises(InputError, match=message):
        play(build("inject", position_features=numbers), make_tokens(0))
    with pytest.raises(InputError, match=message):
        make_perturbation("inject", specs={"agent": SPEC}, position_features=numbers)
    images = make_tokens(0)
    images = images._replace(features=images.features.nan_to_num().byte())
    with pytest.raises(InputError, match="expected features with positions"):
        play(build("inject"), images)


@pytest.mark.parametrize("positions", [(0, 1), (3, 1), (2,)])
def test_an_offset_moves_the_position_and_nothing_else(positions):
    spec = replace(SPEC, positions=positions)
    tokens, _ = moving_env(0)
    output = play(
        make_perturbation("inject", specs={"agent": spec}, spread=0.3), tokens
    )[0]
    added = output.features[0, 0, 4:]
    anchors = tokens.features[0, 0, 1:3]
    offsets = (added[:, None] - anchors).abs()
    fixed = [number for number in range(4) if number not in positions]
    deviation = (
        offsets[..., fixed].amax(-1, keepdim=True) if fixed else offsets[..., :1] * 0
    )
    near = (offsets[..., positions].amax(-1, keepdim=True) <= 0.3) & (deviation == 0)
    assert near.any(1).all()
    assert len(added[:, positions].unique(dim=0)) == len(added)


def test_tokens_without_a_known_position_take_no_distractors():
    for positions, message in (
        (None, "these tokens do not say which of their features are a position"),
        ((), "these tokens have no position"),
    ):
        spec = replace(SPEC, positions=positions)
        with pytest.raises(UnfitTokensError, match=f"position_features: .*{message}"):
            make_perturbation("inject", specs={"agent": spec})
        perturbation = make_perturbation(
            "inject", specs={"agent": spec}, position_features=[0]
        )
        assert play(perturbation, make_tokens(0))[0].num_tokens == 9 + 32
    for numbers in ([], [-1], [1, 1]):
        with pytest.raises(InputError, match=r"position_features: expected .*, got"):
            build("inject", position_features=numbers)


# In environments

BUILDERS: dict[str, Callable[..., BatchedEnv]] = {
    name: partial(make_batched_env, name, 4, **options)
    for name, options in {
        "simple_centroid": {"counts": "2-3-4"},
        "simple_tag": {"counts": "2-2-3"},
        "boxworld": {},
        "cartpole": {"noise_channels": 2, "channel_ids": True},
    }.items()
}


@pytest.mark.parametrize("suite", ["quick", "standard", "full"])
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("simple_centroid", "noise"),
        ("simple_tag", "obstacle"),
        ("boxworld", "these tokens do not say which of their types are noise"),
        ("cartpole", "these tokens have no position"),
    ],
)
def test_suites_inject_what_is_noise_in_an_env(suite, env, expected):
    listed = compose("evaluate", [f"suite={suite}"])["perturbations"]
    entries = [entry for entry in listed if entry["name"] == "inject"]
    batched_env = BUILDERS[env]()
    (spec, *_) = (group.tokens for group in batched_env.groups.values())
    _, *built = cases_of({}, levels(*entries), [], batched_env)
    assert len(built) >= len(entries) > 0
    for case in built:
        if expected in spec.type_names:
            assert not case.missing
            assert spec.type_names[case.perturbation.type_index] == expected
        else:
            # Where no token is the observer's own, nothing can be near it.
            assert expected in case.missing or case.options.get("place") == "near"


def test_in_boxworld_cells_move_and_colors_stay():
    env = BUILDERS["boxworld"]()
    env.reset()
    tokens = env.observe()["agent"]
    (spec,) = (group.tokens for group in env.groups.values())
    options: dict[str, Any] = {"token_type": "lock", "spread": 0.3, "count": 5}
    perturbation = make_perturbation("inject", specs={"agent": spec}, **options)
    state = perturbation.start(tokens, keys(4))
    output, state = perturbation(tokens, state)
    anchors = state["anchor"][..., None].expand(-1, -1, -1, 5)
    offsets = output.features[..., -5:, :] - tokens.features.gather(-2, anchors)
    assert (offsets[..., :3] == 0).all()
    assert (offsets[..., 3:] != 0).all()
    assert (offsets[..., 3:].abs() <= 0.3 + 1e-6).all()


def test_tokenizers_say_what_is_a_position():
    for module, tokenizer, positions in (
        ("mpe2.simple_spread_v3", "simple_spread", (0, 1)),
        ("mpe2.simple_spread_v3", "features", ()),
    ):
        env = make_batched_env("pettingzoo", 1, module=module, tokenizer=tokenizer)
        for group in env.groups.values():
            assert group.tokens.positions == positions
