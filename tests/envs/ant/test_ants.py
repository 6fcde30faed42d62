"""The ants: against their simulators' own envs, channels, rewards, pictures.

``python tests/envs/ant/test_ants.py`` rewrites the golden file; a change in it is a
change of the dynamics, which needs a higher ``version``. The tests of all environments
around simulators are in test_simulated.py.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.envs import make_batched_env
from marl_pool.envs.ant.base import JOINTS, AntEnv, skeleton
from marl_pool.envs.drawing.canvas import ATTENTION

GOLDEN = GOLDEN_FILES / "ants.json"
EACH_ANT = pytest.mark.parametrize("name", ["ant", "ant_bullet"])
DOUBLE: dict[str, Any] = {"dtype": torch.float64}

BULLET = """
import sys, json
import numpy as np
from marl_pool.envs.ant.bullet import gym_shim
with gym_shim():
    from pybullet_envs.gym_locomotion_envs import AntBulletEnv
seed, actions = json.load(sys.stdin)
env = AntBulletEnv()
env.reset()
env.seed(seed)
seen = [env.reset().tolist()]
rewards = []
for action in actions:
    observation, reward, over, _ = env.step(np.array(action, np.float32))
    seen.append(observation.tolist())
    rewards.append([reward, max(0, sum(env.rewards[1:])), bool(over)])
print(json.dumps([seen, rewards]))
"""
"""What the published code would do, with our stand-in for the old gym."""


def make_started_env(name: str, num_envs: int = 1, **options: Any) -> AntEnv:
    env = make_batched_env(name, num_envs, **options)
    assert isinstance(env, AntEnv)
    env.reset()
    return env


def example_actions(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 1, 8, generator=generator) * 2 - 1


def episode_seed(env: AntEnv) -> int:
    cursor = env._cursors[0]
    assert cursor is not None
    return cursor.log.seed


@pytest.mark.parametrize("contact_forces", [False, True])
def test_mujoco_ant_matches_gymnasium(contact_forces):
    from gymnasium.envs.mujoco.ant_v5 import AntEnv

    options = {**DOUBLE, "contact_forces": contact_forces}
    env, modest = (
        make_started_env("ant", **options),
        make_started_env("ant", alive_bonus=False, **options),
    )
    original = AntEnv(include_cfrc_ext_in_observation=contact_forces)
    expected, _ = original.reset(seed=episode_seed(env))
    for action in example_actions(80):
        assert np.array_equal(env.readings[0].numpy(), expected)
        step, second = (ant.step({"agent": action}) for ant in (env, modest))
        expected, reward, over, _, info = original.step(action.numpy().reshape(8))
        assert step.rewards["agent"].item() == reward
        unbonused = max(0, reward - info["reward_survive"])
        assert second.rewards["agent"].item() == pytest.approx(unbonused, abs=1e-12)
        assert step.terminated.item() == over
        if over:
            break
    assert int(env.steps) > 20


def test_bullet_ant_matches_pybullet():
    env = make_started_env("ant_bullet", **DOUBLE)
    modest = make_started_env("ant_bullet", alive_bonus=False, **DOUBLE)
    actions = example_actions(100)
    sent = json.dumps([episode_seed(env), actions.flatten(1).tolist()])
    result = subprocess.run(
        [sys.executable, "-c", BULLET],
        input=sent,
        capture_output=True,
        text=True,
        check=True,
    )
    readings, outcomes = json.loads(result.stdout.splitlines()[-1])
    for action, expected, outcome in zip(actions, readings, outcomes, strict=False):
        assert env.readings[0].tolist() == expected
        step, second = (ant.step({"agent": action}) for ant in (env, modest))
        reward, unbonused, over = outcome
        assert step.rewards["agent"].item() == pytest.approx(reward)
        assert second.rewards["agent"].item() == pytest.approx(unbonused)
        assert step.terminated.item() == over


def test_fallen_ant_terminates():
    # Legs cannot pass through the ground, so that the ant turns over in the end.
    env = make_started_env("ant_bullet", 4, seed=1)
    hard = torch.tensor([1.0, -1, -1, 1, 1, -1, -1, 1]).repeat(4, 1, 1)
    for _ in range(600):
        step = env.step({"agent": hard})
        if step.terminated.any():
            break
        hard = hard if int(env.steps[0]) % 20 else -hard
    assert step.terminated.any()
    assert (step.rewards["agent"][step.terminated] < 0).all()


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [("ant", {}, 27), ("ant", {"contact_forces": True}, 105), ("ant_bullet", {}, 28)],
)
def test_channel_tokens_with_and_without_channel_ids(name, options, count):
    env = make_started_env(name, 2, **options)
    group = env.groups["agent"]
    assert (group.num_agents, group.action_space) == (1, spaces.Box(-1, 1, (8,)))
    assert (group.tokens.num_tokens, group.tokens.num_features) == (count, 1)
    assert group.tokens.type_names == ("channel",)
    assert not group.tokens.has_self
    tokens = env.observe()["agent"]
    assert tokens.features.shape == (2, 1, count, 1)
    assert torch.equal(tokens.features[:, 0, :, 0], env.readings)
    assert not tokens.types.any()
    assert not tokens.padding.any()
    typed = make_started_env(name, 2, channel_ids=True, **options)
    names = typed.channel_names()
    assert len(set(names)) == count
    assert typed.groups["agent"].tokens.type_names == tuple(names)
    assert typed.observe()["agent"].types[1, 0].tolist() == list(range(count))


@EACH_ANT
def test_channel_names_match_the_readings(name):
    """Each joint's angle changes as its velocity says."""
    env = make_started_env(name, **DOUBLE)
    where = {channel: i for i, channel in enumerate(env.channel_names())}
    angles = [where[f"{joint}_angle"] for joint in JOINTS]
    speeds = [where[f"{joint}_velocity"] for joint in JOINTS]
    agreed: list[bool] = []
    for action in example_actions(10).repeat_interleave(6, dim=0):
        before = env.readings[0].clone()
        env.step({"agent": action})
        moved, speed = (env.readings[0] - before)[angles], env.readings[0, speeds]
        fast = speed.abs() > 0.1
        agreed += (moved.sign() == speed.sign())[fast].tolist()
    assert len(agreed) > 80
    assert np.mean(agreed) > 0.85
    if name == "ant":
        height = env.readings[0, where["height"]].item()
        assert env.parts[0, 0, 2].item() == pytest.approx(height, rel=0.05)


@EACH_ANT
def test_frame_stack_shifts_and_starts_with_copies(name):
    env = make_started_env(name, 2, num_frames=3)
    features = env.observe()["agent"].features
    assert torch.equal(features, features[..., -1:].expand_as(features))
    for action in example_actions(4):
        before = env.observe()["agent"].features
        env.step({"agent": action.expand(2, 1, 8)})
        features = env.observe()["agent"].features
        assert torch.equal(features[..., :2], before[..., 1:])
        assert torch.equal(features[:, 0, :, 2], env.readings)
    env.reset(torch.tensor([True, False]))
    features = env.observe()["agent"].features
    assert (features[0] == features[0, ..., -1:]).all()
    assert not (features[1] == features[1, ..., -1:]).all()


@EACH_ANT
def test_actions_are_clipped(name):
    env, twin = make_started_env(name), make_started_env(name)
    actions = torch.tensor([[[3.0, -5, 0.5, 1, -1, 0, 2, -2]]])
    step = env.step({"agent": actions})
    expected = twin.step({"agent": actions.clamp(-1, 1)})
    assert torch.equal(env.observations, twin.observations)
    assert torch.equal(step.rewards["agent"], expected.rewards["agent"])


# Pictures and bad input


@EACH_ANT
def test_body_parts_form_legs_of_the_right_lengths(name):
    env = make_started_env(name, **DOUBLE)
    for action in example_actions(20):
        env.step({"agent": action})
    legs = skeleton(env.parts[0].numpy())
    lengths = np.linalg.norm(np.diff(legs, axis=1), axis=-1)
    root = np.sqrt(2) / 5
    expected = np.tile([root, root, 2 * root], (4, 1))
    np.testing.assert_allclose(lengths, expected, atol=2e-3)
    assert (legs[:, 3, 2] > 0).all()  # no foot is below the ground


def test_skeleton_is_recovered_from_segment_midpoints():
    rng = np.random.default_rng(0)
    legs = rng.normal(size=(4, 4, 3))
    legs[:, 0] = legs[0, 0]
    middles = (legs[:, 1:] + legs[:, :-1]) / 2
    parts = np.concatenate([legs[0, :1], middles.reshape(12, 3)])
    np.testing.assert_allclose(skeleton(parts), legs)


@EACH_ANT
def test_frame_shows_the_ant_and_attention_bars(name):
    env = make_started_env(name, 2)
    count = len(env.channel_names())
    plain = env.frame(1, size=256)
    body = (plain == (196, 92, 40)).all(-1)
    rows, columns = body.nonzero()
    assert 50 < rows.mean() < 200
    assert abs(columns.mean() - 128) < 12
    first = env.frame(1, attention=torch.eye(count)[0], size=256)
    last = env.frame(1, attention=torch.eye(count)[-1], size=256)
    orange = [(image == ATTENTION).all(-1) for image in (first, last)]
    # The first channel's bar is at the left, and the last one's at the right.
    halves = [(image[:, :128].any(), image[:, 128:].any()) for image in orange]
    assert halves == [(True, False), (False, True)]


@EACH_ANT
def test_a_picture_follows_the_ant(name):
    env = make_started_env(name)
    before = env.frame()
    subset = env.select(torch.tensor([0]))
    for action in example_actions(10):
        env.step({"agent": action})
    assert np.array_equal(subset.frame(), before)
    assert not np.array_equal(env.frame()[40:], before[40:])  # above, it counts steps
    runaway = env.observations.clone()
    runaway[:, len(env.channels) :] = 1e12
    env.observations = runaway
    env.frame()


# Golden trajectory


def golden() -> dict[str, Any]:
    """Return observations and rewards of two environments of each kind."""
    runs: dict[str, Any] = {}
    for name in ("ant", "ant_bullet"):
        env = make_started_env(name, 2, seed=7, **DOUBLE)
        readings, rewards = [env.readings.tolist()], []
        for action in example_actions(12):
            sent = torch.cat([action, -action])
            rewards.append(env.step({"agent": sent}).rewards["agent"].tolist())
        readings.append(env.readings.tolist())
        runs[name] = {"version": env.version, "seen": readings, "rewards": rewards}
    return runs


def test_the_golden_trajectory_has_not_changed():
    runs = golden()
    for name, expected in json.loads(GOLDEN.read_text()).items():
        run = runs[name]
        assert run["version"] == expected["version"]
        for part in ("seen", "rewards"):
            np.testing.assert_allclose(run[part], expected[part], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden()) + "\n")
