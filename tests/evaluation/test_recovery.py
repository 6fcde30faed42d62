"""Recovery after a perturbation's end, and the worst of several samples."""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from helpers.evaluated import levels
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import EpisodeReturns, play
from marl_pool.evaluation.measure import measure
from marl_pool.evaluation.results import Result
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.base import Policy

EPISODES = 12
END = 6
ENVS: dict[str, Any] = {
    # Episodes of equal length, and of different ones.
    "simple_centroid": {"counts": "2-3-4", "max_steps": 12},
    "cartpole": {"max_steps": 60},
}
each_env = pytest.mark.parametrize("name", ENVS)


def make(name: str) -> BatchedEnv:
    return make_batched_env(name, EPISODES, dtype=torch.float64, **ENVS[name])


def policies(name: str) -> dict[str, Policy]:
    (group,) = make(name).groups.values()
    return {"agent": make_heuristic(name, group)}


def late_noise(**options: Any) -> dict[str, Any]:
    return {"name": "action_noise", "onset": 2, "end": END, **options}


def measure_env(name: str, *entries: dict[str, Any], **options: Any) -> Any:
    return measure(policies(name), partial(make, name), levels(*entries), **options)


def rewards_by_step(name: str, perturbation: Any) -> np.ndarray:
    """Rewards ``(steps, episodes)`` of single episodes; 0 once they are over."""
    steps = range(ENVS[name]["max_steps"])
    after = play(policies(name), make(name), perturbation, after=steps).after
    tails = np.stack([*(after[step]["agent"] for step in steps), np.zeros(EPISODES)])
    rewards: np.ndarray = tails[:-1] - tails[1:]
    return rewards


@each_env
def test_rewards_after_a_step_are_those_of_a_loop_by_hand(name: str) -> None:
    env, policy = make(name), policies(name)["agent"]
    env.reset()
    rewards = torch.zeros(ENVS[name]["max_steps"], EPISODES, dtype=torch.float64)
    over = torch.zeros(EPISODES, dtype=torch.bool)
    for step_rewards in rewards:
        action = policy.scale(policy.act(env.observe()["agent"]).action)
        step = env.step({"agent": action})
        step_rewards += step.rewards["agent"].mean(1).masked_fill(over, 0)
        over |= step.terminated | step.truncated
    assert name != "cartpole" or len(set((rewards != 0).sum(0).tolist())) > 1
    np.testing.assert_allclose(rewards_by_step(name, None), rewards, atol=1e-9)
    episodes = play(policies(name), make(name), after=[0])
    np.testing.assert_allclose(episodes.after[0]["agent"], episodes.returns["agent"])


@each_env
def test_the_drop_after_the_end_is_a_part_of_the_drop(name: str) -> None:
    results = measure_env(name, late_noise(severities=[0.0, 1.0])).results
    _, zero, strong = results[:3]
    assert (zero.drop_after, zero.drop_after_low, zero.drop_after_high) == (0, 0, 0)
    noise = make_perturbation("action_noise", severity=1.0, onset=2, end=END)
    losses = rewards_by_step(name, None) - rewards_by_step(name, noise)
    # Nothing is lost before the onset.
    np.testing.assert_allclose(losses[:2], 0, atol=1e-9)
    assert strong.drop == pytest.approx(losses.sum(0).mean())
    assert strong.drop_after == pytest.approx(losses[END:].sum(0).mean())
    assert strong.drop_after_low < strong.drop_after < strong.drop_after_high


def test_a_perturbation_that_does_not_end_has_no_recovery() -> None:
    entries = (
        {"name": "action_noise", "severities": [0.5]},
        late_noise(end=12, severities=[0.5]),
        late_noise(severities=[0.5]),
    )
    clean, *rows = measure_env("simple_centroid", *entries).results[:4]
    assert [math.isnan(row.drop_after) for row in (clean, *rows)] == [1, 1, 1, 0]


def comparable_numbers(row: Result) -> dict[str, Any]:
    """All numbers except the columns added by several samples."""
    numbers = dataclasses.asdict(row).items()
    return {key: value for key, value in numbers if not key.startswith("worst")}


def returns_of(severity: float, draw: int) -> EpisodeReturns:
    noise = make_perturbation("action_noise", severity=severity)
    name = "simple_centroid"
    return play(policies(name), make(name), noise, draw=draw).returns


def test_the_worst_return_is_the_lowest_of_each_episode() -> None:
    entry = {"name": "action_noise", "severities": [0.0, 0.8]}
    single_sample = measure_env("simple_centroid", entry)
    three_samples = measure_env("simple_centroid", entry, worst_of=3)
    # Everything else is as in the first sample.
    np.testing.assert_array_equal(single_sample.returns, three_samples.returns)
    for before, after in zip(single_sample.results, three_samples.results, strict=True):
        np.testing.assert_equal(comparable_numbers(before), comparable_numbers(after))
        assert math.isnan(before.worst)
    clean, zero, strong = three_samples.results[:3]
    assert math.isnan(clean.worst)
    assert (zero.worst, zero.worst_drop) == (zero.mean, 0)
    samples = [returns_of(0.8, draw)["agent"] for draw in range(3)]
    np.testing.assert_array_equal(samples[0], three_samples.returns[2])
    assert all((samples[0] != sample).all() for sample in samples[1:])
    lowest = np.min(samples, axis=0)
    assert strong.worst == pytest.approx(lowest.mean())
    assert strong.worst_low < strong.worst < strong.worst_high
    drop = (three_samples.returns[0] - lowest).mean()
    assert strong.worst_drop == pytest.approx(drop)
    assert strong.worst_drop_low < strong.worst_drop < strong.worst_drop_high


def test_optional_columns_are_shown_only_with_numbers() -> None:
    entry = late_noise(severities=[0.5])
    full = str(measure_env("simple_centroid", entry, worst_of=2))
    basic = str(measure_env("simple_centroid", {**entry, "end": None}))
    for word in ("after", "worst"):
        assert word in full
        assert word not in basic
