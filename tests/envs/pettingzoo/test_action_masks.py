"""Action masks: no policy takes an action that the environment does not allow."""

import pytest
import torch
from gymnasium import spaces
from torch.utils._pytree import tree_leaves, tree_map

import marl_pool
from helpers.joint_actions import JointEnv
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.policies.actions import (
    ActionSpec,
    entropy,
    kl_divergence,
    log_prob,
    mask_logits,
    mode,
    sample,
)
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

MODULE = "helpers.joint_actions:JointEnv"
MASKED = {"kind": "one", "masks": "observation"}
"""An env that allows some of four actions in each step."""


def masked_env(num_envs=3, module=MODULE, **options):
    return PettingZooEnv(num_envs, module=module, options=MASKED | options, seed=1)


def misfitting(action, **options):
    """Build an environment whose masks do not fit its actions."""
    env = JointEnv(**options)
    env.space = action
    return env


def random_masks(rows=400, width=5):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(rows, width, generator=generator) < 0.4
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=generator)] = True
    logits = 4 * torch.randn(rows, width, generator=generator)
    return logits, mask


def test_masked_distributions_equal_those_over_the_allowed_actions():
    spec, (logits, mask) = ActionSpec(n=5), random_masks()
    masked = mask_logits(logits, mask)
    reference = torch.distributions.Categorical(
        logits=logits.masked_fill(~mask, -torch.inf)
    )
    action = mode(spec, masked)
    assert mask.gather(-1, action[:, None]).all()
    torch.testing.assert_close(
        log_prob(spec, masked, action), reference.log_prob(action)
    )
    assert (masked.softmax(-1)[~mask] == 0).all()
    torch.testing.assert_close(entropy(spec, masked), reference.entropy())
    flipped = mask_logits(logits.flip(0), mask)
    second = torch.distributions.Categorical(logits=flipped.clamp(min=-200.0))
    first = torch.distributions.Categorical(logits=masked.clamp(min=-200.0))
    torch.testing.assert_close(
        kl_divergence(spec, masked, flipped),
        torch.distributions.kl_divergence(first, second),
    )


@pytest.mark.parametrize("number", [0.0, 1e-30, 1e-7, 0.5, 1 - 1e-7, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e12])
def test_no_noise_and_no_logits_sample_an_action_that_is_not_allowed(number, scale):
    spec, (logits, mask) = ActionSpec(n=5), random_masks()
    masked = mask_logits(scale * logits, mask)
    noise = torch.full((len(mask), 1), number)
    action = sample(spec, masked, noise, mask)
    assert mask.gather(-1, action[:, None]).all()
    assert mask.gather(-1, mode(spec, masked)[:, None]).all()


def test_gradients_are_finite_and_zero_where_an_action_is_not_allowed():
    spec, (logits, mask) = ActionSpec(n=5), random_masks()
    mask[:3] = False  # absent agents
    logits.requires_grad_()
    masked = mask_logits(logits, mask)
    action = mode(spec, masked)
    old = mask_logits(logits.detach().flip(-1), mask)
    total = log_prob(spec, masked, action) + entropy(spec, masked)
    (total + kl_divergence(spec, old, masked)).sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[3:][mask[3:]] != 0).any()


def test_an_absent_mask_is_no_part_of_tokens():
    tokens = Tokens(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3).bool())
    assert len(tokens.parts) == len(tokens.columns) == 3
    assert tokens.map(torch.clone).action_mask is None
    masked = tokens._replace(action_mask=torch.ones(2, 5).bool())
    assert len(tree_leaves(masked)) == 4
    assert masked.at(0).action_mask.shape == (5,)
    assert tree_map(lambda part: part[:1], masked).action_mask.shape == (1, 5)


def test_a_function_is_held_to_what_is_allowed():
    def lowest(observation):
        return observation["action_mask"].argmax(-1)

    def illegal(observation):
        return observation["action_mask"].argmin(-1)

    task = {"name": "pettingzoo", "module": MODULE, "options": MASKED}
    results = marl_pool.evaluate(lowest, task, episodes=2)
    assert results.results[0].episodes == 2
    with pytest.raises(InputError, match="that action_mask allows, "):
        marl_pool.evaluate(illegal, task, episodes=2)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (spaces.Discrete(5), r"agent 'a_0': expected an action_mask of shape \(5,\)"),
        (spaces.Box(-1, 1, (5,)), "expected no action_mask for Box"),
    ],
)
def test_masks_that_do_not_fit_the_actions_are_refused(action, message):
    with pytest.raises(InputError, match=message):
        masked_env(module=f"{__name__}:misfitting", action=action)
