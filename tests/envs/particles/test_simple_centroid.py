"""Simple centroid: spawns, rewards, forces, names, golden trajectory.

``python tests/envs/particles/test_simple_centroid.py`` writes the golden file anew; a
change in it is a change of the dynamics, which asks for a higher
``SimpleCentroid.version``.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from helpers.particles import actions_for, particles, run
from helpers.paths import GOLDEN_FILES
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.particles.simple_centroid import SimpleCentroid
from marl_pool.utils.errors import InputError

GOLDEN = GOLDEN_FILES / "simple_centroid.json"


def test_starts_lie_where_the_paper_puts_them():
    env = SimpleCentroid(4000, num_signal=3, num_noise=28)
    env.reset()
    moving, noise = env.state[:, :4], env.state[:, 4:]
    assert env.spread == pytest.approx(2.5)
    for part, bound in ((moving[..., :2], 2.5), (moving[..., 2:], 2.0)):
        # A uniform distribution fills its range; 32 000 draws come close to its ends.
        assert bound * 0.999 < part.abs().max() <= bound
        assert part.mean().abs() < bound * 0.02
        assert part.var() == pytest.approx(bound**2 / 3, rel=0.02)
    assert noise[..., 2:].abs().max() == 0
    # Noise shares an offset of length U(0, 1) in a uniform direction.
    offset = noise[..., :2].mean(1)
    assert noise[..., :2].abs().max() <= 3.5
    per_axis = (1 / 3) / 2 + (2.5**2 / 3) / 28
    assert offset.mean(0).abs().max() < 0.05
    assert offset.var(0).numpy() == pytest.approx([per_axis, per_axis], rel=0.08)
    still = SimpleCentroid(500, num_signal=3, num_noise=28, noise_offset=0.0)
    still.reset()
    assert still.state[:, 4:, :2].abs().max() <= 2.5


@pytest.mark.parametrize(
    ("options", "spread"),
    [
        ({"num_signal": 1, "num_noise": 0}, 2.0),
        ({"num_signal": 63, "num_noise": 192}, 4.0),
        ({"num_signal": 3, "num_noise": 28, "spread": 0.3}, 0.3),
    ],
)
def test_spread_grows_with_the_number_of_entities(options, spread):
    env = SimpleCentroid(300, **options)
    env.reset()
    assert env.spread == pytest.approx(spread)
    assert env.state[:, : env.num_movable, :2].abs().max() <= spread + 1e-6


def test_each_agent_is_paid_for_its_distance_after_the_step():
    env = particles("simple_centroid", 4, num_agents=3, reward_scale=0.5)
    rewards = run(env, 2)[1][-1]
    centroid = env.state[:, 3:6, :2].mean(1)
    torch.testing.assert_close(env.centroid(), centroid)
    away = env.state[:, :3, :2] - centroid[:, None]
    expected = -0.5 * away.square().sum(-1).sqrt().sqrt()
    torch.testing.assert_close(rewards, expected)
    assert len(set(rewards.flatten().tolist())) == 12


def test_signal_is_pushed_with_unit_force_in_uniform_directions():
    env = particles("simple_centroid", 300, counts="1-3-0")
    env.state[..., 2:] = 0
    pushes = []
    for step in range(20):
        before = env.state[:, 1:4, 2:].clone()
        env.step(actions_for(env, step))
        pushes.append((env.state[:, 1:4, 2:] - 0.75 * before) / 0.1)
    push = torch.stack(pushes)
    torch.testing.assert_close(push.norm(dim=-1), torch.ones(20, 300, 3).double())
    angle = torch.atan2(push[..., 1], push[..., 0]).flatten() / (2 * math.pi) + 0.5
    counts = torch.histc(angle, 12, 0, 1)
    expected = angle.numel() / 12
    # Chi-squared with 11 degrees of freedom exceeds 38 once in ten thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 38


def test_speeds_are_capped():
    env = particles("simple_centroid", 64)
    env.state[:, :4, 2:] = 30
    env.step(actions_for(env, 0))
    speed = env.state[..., 2:].norm(dim=-1)
    assert speed[:, 0].numpy() == pytest.approx(5.0, rel=1e-5)
    assert speed[:, 1:4].numpy() == pytest.approx(2.0, rel=1e-5)


def test_actions_are_clipped_to_their_box():
    tame, wild = SimpleCentroid(8), SimpleCentroid(8)
    tame.reset()
    wild.reset()
    action = torch.linspace(-3, 4, 40).view(8, 1, 5)
    wild.step({"agent": action})
    tame.step({"agent": action.clamp(0, 1)})
    assert torch.equal(tame.state, wild.state)


def test_each_action_pushes_in_its_direction():
    env = SimpleCentroid(5, continuous_actions=False)
    env.reset()
    env.state[..., 2:] = 0
    env.step({"agent": torch.arange(5)[:, None]})
    expected = [[0, 0], [-0.5, 0], [0.5, 0], [0, -0.5], [0, 0.5]]
    torch.testing.assert_close(env.state[:, 0, 2:], torch.tensor(expected))


def test_unknown_names_and_options_list_the_choices():
    with pytest.raises(
        InputError, match=r"choose from .*simple_centroid.*Did you mean"
    ):
        make_batched_env("simple_centriod", 1)
    with pytest.raises(InputError, match=r"num_noise.*Did you mean 'num_noise'"):
        make_batched_env("simple_centroid", 1, num_nois=3)
    with pytest.raises(InputError, match="unknown heuristic 'nobody'"):
        make_heuristic("nobody", SimpleCentroid(1).groups["agent"])


def test_custom_env_is_found_by_its_path():
    target = "marl_pool.envs.particles.simple_centroid:SimpleCentroid"
    assert isinstance(make_batched_env(target, 1), SimpleCentroid)
    with pytest.raises(InputError, match="must be a subclass of"):
        make_batched_env("marl_pool.tokens:TokenSpec", 1)


def golden() -> dict[str, Any]:
    """A short trajectory of two environments with two agents."""
    env = particles("simple_centroid", 2, counts="2-2-3", seed=7)
    start = env.state.tolist()
    states, rewards = run(env, 12)
    features = env.observe()["agent"].features
    return {
        "version": env.version,
        "start": start,
        "states": states[3::4].tolist(),
        "rewards": rewards.tolist(),
        "features": features.tolist(),
    }


def test_the_golden_trajectory_has_not_changed():
    expected, data = json.loads(GOLDEN.read_text()), golden()
    assert expected.keys() == data.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(data[name], values, rtol=0, atol=1e-9, err_msg=name)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden()) + "\n")
