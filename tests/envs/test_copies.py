"""Copies and pickles of environments, and of those that a simulator computes."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.env_cases import CASES
from helpers.samples import random_actions
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv

STEPS = 4


def played(env: BatchedEnv, seed: int) -> list[Tensor]:
    """Take a few steps, with a reset of one environment; return what they lead to."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for number in range(STEPS):
        actions = {}
        for name, group in env.groups.items():
            rows = env.num_envs * group.num_agents
            flat = random_actions(group.actions, rows, generator, env.dtype)
            shape = (env.num_envs, group.num_agents)
            actions[name] = group.actions.clip(flat.unflatten(0, shape))
        step = env.step(actions)
        results += [*step.rewards.values(), step.terminated, step.truncated]
        if number == 1:
            env.reset(torch.tensor([True, False]))
        results += [part for t in env.observe().values() for part in t.parts]
    return results


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_copy_continues_exactly_and_leaves_the_environment_alone(
    name: str, options: dict, copied: Callable[[BatchedEnv], BatchedEnv]
):
    def begun() -> BatchedEnv:
        env = make_batched_env(name, 2, seed=1, **options)
        untouched = copied(env)
        for branch in (env, untouched):
            branch.reset()
        results = [played(branch, 0) for branch in (env, untouched)]
        untouched.frame()  # what it draws with is copied, too
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        return untouched

    env, twin = begun(), begun()
    copies = [copied(env), copied(env)]
    expected = played(twin, 1)
    for branch in (copies[0], env, copies[1]):
        actual = played(branch, 1)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
