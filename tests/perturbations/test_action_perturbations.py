"""Perturbed actions: identity at 0, random streams, and properties of each."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from torch import Tensor

from helpers.perturbed import (
    ACTION_VARIANTS,
    bits,
    build,
    in_the_loop,
    keys,
    make_tokens,
    same,
    seeds,
    severities,
)
from marl_pool.api.perturb import perturb_env
from marl_pool.envs import make_batched_env
from marl_pool.perturbations.base import Perturbation, PerturbationState
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout

AGENTS, CHOICES, STEPS = 2, 7, 6
DISCRETE = spaces.Discrete(CHOICES)
BOX = spaces.Box(np.float32([-1, 0, 2]), np.float32([1, 4, 3]))
Space = spaces.Box | spaces.Discrete

every = pytest.mark.parametrize(
    ("name", "options"), ACTION_VARIANTS, ids=[f"{n}-{o}" for n, o in ACTION_VARIANTS]
)
in_each_space = pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["n", "box"])


def random_actions(
    space: Space, envs: int = 3, seed: int = 0, steps: int = STEPS
) -> Tensor:
    """Actions ``(steps, envs, agents, …)``; some numbers are out of range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, envs, AGENTS)
    if isinstance(space, spaces.Discrete):
        return torch.randint(CHOICES, shape, generator=generator)
    return 3 * torch.randn(*shape, 3, generator=generator)


def executed_actions(
    perturbation: Perturbation, actions: Tensor, space: Space, **options: Any
) -> Tensor:
    """Return the executed actions of some steps."""
    return torch.stack([a for a, _ in states(perturbation, actions, space, **options)])


def states(
    perturbation: Perturbation, actions: Tensor, space: Space, **options: Any
) -> Iterator[tuple[Tensor, PerturbationState]]:
    tokens = make_tokens(0, envs=actions.shape[1])
    state = perturbation.start(tokens, keys(actions.shape[1], **options))
    for action in actions:
        output, state = perturbation(tokens, state)
        assert same(output, tokens)
        action, state = perturbation.act(action, state, space)
        yield action, state


# Properties of all action perturbations


@in_each_space
@every
def test_severity_0_executes_what_was_chosen(name, options, space):
    actions = random_actions(space)
    if isinstance(space, spaces.Box):
        actions[0, 0, 0, 0] = -0.0
    for severity in (0.0, [0.0, 0.8]):
        perturbation = build(
            name, severity=severity, ramp=1 if severity else None, **options
        )
        tokens = make_tokens(0)
        state = perturbation.start(
            tokens, keys(), episodes=torch.zeros(3, dtype=torch.int64)
        )
        for action in actions:
            _, state = perturbation(tokens, state)
            done, state = perturbation.act(action, state, space)
            assert torch.equal(bits(done), bits(action))


@in_each_space
@every
@given(seed=seeds, severity=severities)
def test_an_env_is_the_same_alone_and_among_others(
    name, options, space, seed, severity
):
    perturbation, actions = (
        build(name, severity=severity, **options),
        random_actions(space, 4, seed),
    )
    before = actions.clone()
    together = executed_actions(perturbation, actions, space, seed=seed)
    row = slice(2, 3)
    alone = executed_actions(perturbation, actions[:, row], space, seed=seed, first=2)
    assert torch.equal(together[:, row], alone)
    assert torch.equal(actions, before)


@in_each_space
@every
@pytest.mark.parametrize("key_options", [{"seed": 1}, {"first": 9}, {"episode": 1}])
def test_other_seeds_envs_and_episodes_differ(name, options, space, key_options):
    perturbation, actions = build(name, severity=0.5, **options), random_actions(space)
    reference, variant = (
        executed_actions(perturbation, actions, space),
        executed_actions(perturbation, actions, space, **key_options),
    )
    assert not torch.equal(reference, variant)


@in_each_space
@every
def test_each_env_has_a_severity_and_each_agent_numbers_of_its_own(
    name, options, space
):
    actions = random_actions(space)[:, :, :1].expand_as(random_actions(space)).clone()
    batch = executed_actions(
        build(name, severity=[0.4, 0.9], **options), actions, space
    )
    assert not torch.equal(batch[:, :, 0], batch[:, :, 1])
    *_, (_, state) = states(build(name, severity=[0.4, 0.9], **options), actions, space)
    for env, severity in enumerate(state["severity"].tolist()):
        row = slice(env, env + 1)
        perturbation = build(name, severity=severity, **options)
        assert torch.equal(
            executed_actions(perturbation, actions[:, row], space, first=env),
            batch[:, row],
        )


@in_each_space
@every
def test_a_restart_touches_the_envs_that_begin_anew(name, options, space):
    perturbation, actions = build(name, severity=0.7, **options), random_actions(space)
    where, tokens = torch.tensor([False, True, False]), make_tokens(0)
    *_, (_, old) = states(perturbation, actions[:3], space)
    merged = perturbation.start(tokens, keys(episode=1), old, where)
    assert merged.keys() == old.keys()
    fresh = executed_actions(perturbation, actions, space, episode=1)
    going_on = executed_actions(perturbation, actions, space)
    for step in range(3):
        _, merged = perturbation(tokens, merged)
        mixed = torch.where(
            where.view(-1, *[1] * (actions.dim() - 2)), actions[step], actions[3 + step]
        )
        done, merged = perturbation.act(mixed, merged, space)
        assert torch.equal(done[1], fresh[step, 1])
        assert torch.equal(done[[0, 2]], going_on[3 + step, [0, 2]])


# Noise


def test_discrete_noise_chooses_each_action_as_often():
    actions = torch.full((50, 400, AGENTS), 3)
    done = executed_actions(build("action_noise", severity=0.7), actions, DISCRETE)
    shares = done.flatten().bincount(minlength=CHOICES) / done.numel()
    # Each share has a standard error of 0.0015.
    expected = torch.full((CHOICES,), 0.1)
    expected[3] = 0.4
    assert (shares - expected).abs().max() < 0.01


def test_continuous_noise_is_gaussian_in_units_of_half_the_range():
    middle = torch.tensor([0.0, 2.0, 2.5])
    actions = middle.expand(50, 400, AGENTS, 3)
    done = executed_actions(
        build("action_noise", severity=0.4, scale=0.5), actions, BOX
    )
    errors = (done - actions).flatten(0, -2)
    # At a fifth of half the range, clipping is negligible.
    spread = errors.std(0) / torch.tensor([1.0, 2.0, 0.5])
    assert (spread - 0.2).abs().max() < 0.005
    assert errors.mean(0).abs().max() < 0.01
    held = executed_actions(
        build("action_noise", severity=0.4, every=None), actions, BOX
    )
    assert torch.equal(held, held[:1].expand_as(held))


def test_noise_stays_in_the_range():
    done = executed_actions(
        build("action_noise", severity=1.0), random_actions(BOX, 50), BOX
    )
    low, high = (torch.from_numpy(bound) for bound in (BOX.low, BOX.high))
    assert (done >= low).all()
    assert (done <= high).all()


# Losses


def test_an_action_is_lost_as_often_as_the_severity_says():
    actions = random_actions(BOX, 400, steps=50).clamp(0, 1) + 2
    for severity in (0.2, 0.6):
        zero = build("drop_actions", severity=severity, instead="zero")
        lost = (executed_actions(zero, actions, BOX)[..., 1] == 0).double()
        # The standard error is below 0.003.
        assert float(lost.mean()) == pytest.approx(severity, abs=0.015)


def test_a_higher_severity_loses_the_same_actions_and_more():
    actions = random_actions(DISCRETE, 20).clamp(min=1)
    mild, severe = (
        executed_actions(
            build("drop_actions", severity=s, instead="zero"), actions, DISCRETE
        )
        == 0
        for s in (0.3, 0.6)
    )
    assert (mild <= severe).all()
    assert mild.sum() < severe.sum()


@in_each_space
def test_a_lost_action_is_replaced_by_the_one_before(space):
    actions = random_actions(space, 40)
    if isinstance(space, spaces.Box):
        # In the range, and never what replaces a lost action.
        actions = actions.clamp(0.1, 0.9) + torch.tensor([0.0, 0.0, 2.0])
    else:
        actions = actions.clamp(min=1)
    zero = executed_actions(
        build("drop_actions", severity=0.5, instead="zero"), actions, space
    )
    repeat = executed_actions(build("drop_actions", severity=0.5), actions, space)
    lost = zero != executed_actions(build("drop_actions", severity=0.0), actions, space)
    lost = lost.flatten(3).any(-1) if lost.dim() > 3 else lost
    assert 0 < lost.sum() < lost.numel()
    assert torch.equal(repeat[0], zero[0])  # nothing to repeat yet
    for step in range(1, STEPS):
        mask = lost[step]
        assert torch.equal(repeat[step][mask], repeat[step - 1][mask])
        assert torch.equal(repeat[step][~mask], zero[step][~mask])


@in_each_space
def test_an_episode_repeats_no_action_of_the_one_before(space):
    perturbation, tokens = build("drop_actions", severity=1.0), make_tokens(0)
    last = (
        random_actions(space)[0].clamp(0.5, 0.9)
        if space is BOX
        else random_actions(space)[0] + 1
    )
    old = perturbation.start(tokens, keys())
    _, old = perturbation(tokens, old)
    old["executed"] = last
    began = torch.tensor([False, True, False])
    _, state = perturbation(
        tokens, perturbation.start(tokens, keys(episode=1), old, began)
    )
    done, _ = perturbation.act(random_actions(space)[1], state, space)
    assert torch.equal(done[~began], last[~began])
    zero = torch.tensor([0.0, 0.0, 2.0]) if space is BOX else torch.tensor(0)
    assert torch.equal(done[began], zero.expand_as(done[began]))


def test_zero_is_the_number_in_range_that_is_nearest_to_it():
    perturbation = build("drop_actions", severity=1.0, instead="zero")
    done = executed_actions(perturbation, random_actions(BOX), BOX)
    assert torch.equal(done, torch.tensor([0.0, 0.0, 2.0]).expand_as(done))


def test_several_steps_are_lost_in_a_row():
    actions = random_actions(DISCRETE, 50).clamp(min=1)
    perturbation = build("drop_actions", severity=0.5, instead="zero", every=3)
    lost = (executed_actions(perturbation, actions, DISCRETE) == 0).unflatten(0, (2, 3))
    assert torch.equal(lost, lost[:, :1].expand_as(lost))
    assert 0.3 < lost.double().mean() < 0.7


# In rollouts


@pytest.mark.parametrize("name", ["action_noise", "drop_actions"])
def test_the_env_executes_it_and_the_trajectory_holds_what_was_chosen(name):
    clean, noisy = (in_the_loop(name, {}, severity) for severity in (0.0, 0.8))
    received: list[Tensor] = []
    step = noisy.env.step
    noisy.env.step = (  # type: ignore[method-assign]
        lambda actions: received.append(actions["agent"]) or step(actions)  # type: ignore[func-returns-value]
    )
    before, after = (rollout.steps(5)["agent"] for rollout in (clean, noisy))
    assert torch.equal(before.actions, after.actions)
    assert not torch.equal(torch.stack(received), after.actions)
    assert not torch.equal(before.rewards, after.rewards)
    # The first observation follows no action.
    assert same(before.tokens.at(0), after.tokens.at(0))


def test_a_wrapped_env_executes_what_a_rollout_does():
    config = {"name": "drop_actions", "severity": 0.6}
    plain = gymnasium.make("marl_pool/simple_centroid-v0", counts="1-3-4", max_steps=6)
    wrapped = perturb_env(plain, config)
    env = make_batched_env("simple_centroid", 1, counts="1-3-4", max_steps=6, seed=5)
    policy = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    rollout = Rollout(env, policy, perturbation=build(**config))
    trajectory = rollout.steps(6)["agent"]
    wrapped.reset(seed=5)
    for step in range(6):
        action = trajectory.actions[step, 0, 0].numpy()
        _, reward, *_ = wrapped.step(action)
        assert reward == pytest.approx(float(trajectory.rewards[step, 0, 0]), abs=1e-6)


def test_an_agent_that_arrives_has_no_earlier_action_to_repeat():
    perturbation = build("drop_actions", severity=1.0)
    tokens, keys = make_tokens(0), torch.arange(1)
    state = perturbation.start(tokens, keys)
    space = DISCRETE
    absent = tokens._replace(padding=torch.ones_like(tokens.padding))
    ones = torch.ones(tokens.types.shape[:2], dtype=torch.int64)
    for seen in (absent, tokens):
        _, state = perturbation(seen, state)
        executed, state = perturbation.act(ones, state, space)
    assert executed.eq(0).all()
