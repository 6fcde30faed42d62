"""CarRacing: pictures against Gymnasium's, patches, grey, backgrounds, ends.

``python tests/envs/car_racing/test_car_racing.py`` writes the golden file anew; a
change in it is a change of the dynamics, which asks for a higher ``CarRacing.version``.
What all environments around simulators share is in test_simulated.py.
"""

import json
import warnings
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.envs.car_racing.backgrounds import (
    BACKGROUNDS,
    find_background,
    replace_grass,
)
from marl_pool.envs.car_racing.env import CarRacing

GOLDEN = GOLDEN_FILES / "car_racing.json"
AGENT: dict[str, Any] = {
    "patch": 7,
    "stride": 4,
    "num_frames": 1,
    "color": "rgb",
    "zero_rows_bottom": 0,
}
"""AttentionAgent's options."""


def make_started_env(num_envs: int = 1, **options: Any) -> CarRacing:
    env = CarRacing(num_envs, **options)
    env.reset()
    return env


def drive(env: CarRacing, *action: float, steps: int = 1) -> Any:
    actions = torch.tensor(action).expand(env.num_envs, 1, 3)
    for _ in range(steps):
        step = env.step({"agent": actions})
    return step


def moved(**options: Any) -> CarRacing:
    """A car that has left its start, once the zoom has reached its full size."""
    env = make_started_env(**options)
    drive(env, 0.1, -0.5, -1.0, steps=60)
    return env


@pytest.fixture(scope="module")
def moved_car() -> CarRacing:
    return moved(color="rgb")


def oracle(env: CarRacing) -> Any:
    """Gymnasium's environment at the start of the first episode, and its picture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gymnasium.envs.box2d.car_racing import CarRacing as Original
    cursor = env._cursors[0]
    assert cursor is not None
    original = Original(lap_complete_percent=0.95)
    return original, original.reset(seed=cursor.log.seed)[0]


# Observations


def test_images_and_rewards_match_gymnasium():
    env = make_started_env(seed=3, smooth=True)
    original, picture = oracle(env)
    rng = np.random.default_rng(1)
    total = 0.0
    for _ in range(60):
        assert np.array_equal(env.observations[0].numpy(), picture)
        steer, gas, brake = rng.uniform(-0.4, 0.4), 0.5, 0.01
        native = np.array([steer, gas, brake], np.float32)
        picture, reward, over, _, _ = original.step(native)
        step = drive(env, steer, 2 * gas - 1, 2 * brake - 1)
        assert step.rewards["agent"].item() == pytest.approx(reward)
        assert step.terminated.item() == over
        total += reward
    assert total > 10


def test_unsmoothed_images_have_exact_colors(moved_car):
    sharp = moved_car.observations
    colors = {tuple(pixel) for pixel in sharp[0].view(-1, 3).tolist()}
    assert {(102, 204, 102), (102, 230, 102), (102, 102, 102)} <= colors
    smooth = moved(smooth=True)
    difference = sharp.int() - smooth.observations.int()
    assert 0 < difference.abs().float().mean() < 8


def test_downsampling_takes_block_centers():
    from marl_pool.envs.car_racing.simulator import _middles

    assert _middles(6, 2).tolist() == [1, 4]
    assert _middles(1000, 96)[[0, 1, 95]].tolist() == [5, 15, 994]


@given(arrays.arrays(np.uint8, (1, 96, 96, 3), elements=st.integers(0, 255)))
def test_grey_is_opencvs(picture):
    env = CarRacing(1, zero_rows_bottom=0)
    grey = env._to_screens(torch.from_numpy(picture))
    expected = cv2.cvtColor(picture[0], cv2.COLOR_RGB2GRAY)
    assert np.array_equal(grey[0, ..., 0].numpy(), expected)


@pytest.mark.parametrize(
    ("options", "side"),
    [({}, 16), ({"patch": 12, "stride": 12, "color": "rgb"}, 8), (AGENT, 23)],
)
def test_tokens_stack_a_patch_of_each_frame_oldest_first(options, side):
    env = make_started_env(2, **options)
    drive(env, 0.3, 0.0, -1.0, steps=5)
    features = env.observe()["agent"].features[1, 0].numpy()
    assert len(features) == side * side
    _, patch, stride = env.patch_grid
    for token in (0, 3, side, side * side // 2 + 3, side * side - 1):
        y, x = stride * (token // side), stride * (token % side)
        pixels = env.screens[1, :, y : y + patch, x : x + patch].numpy()
        assert np.array_equal(features[token], pixels.reshape(-1))


def test_frame_stack_shifts_and_starts_with_copies():
    env = make_started_env()
    assert (env.screens == env.screens[:, -1:]).all()
    for _ in range(5):
        before = env.screens
        drive(env, 0.0, 1.0, -1.0)
        assert torch.equal(env.screens[:, :3], before[:, 1:])
        assert not torch.equal(env.screens[:, 3], before[:, 3])


def test_instruments_are_black_by_default():
    plain, with_instruments = make_started_env(), make_started_env(zero_rows_bottom=0)
    for env in (plain, with_instruments):
        drive(env, 0.0, 1.0, -1.0, steps=20)
    assert not plain.screens[:, :, -12:].any()
    assert with_instruments.screens[:, :, -12:].any()
    assert torch.equal(plain.screens[:, :, :-12], with_instruments.screens[:, :, :-12])


# Actions and episode ends


def test_actions_are_steering_gas_and_brake():
    env = CarRacing(1)
    sent = torch.tensor([[-2.0, -1.0, 3.0], [0.25, 0.0, 1.0]])
    native = env._to_native(sent)
    assert native.tolist() == [[-1.0, 0.0, 1.0], [0.25, 0.5, 1.0]]
    assert native.dtype == torch.float32


def test_action_repeat():
    single, triple = make_started_env(), make_started_env(action_repeat=3)
    for _ in range(4):
        step = drive(triple, 0.2, 0.5, -1.0)
        rewards = [drive(single, 0.2, 0.5, -1.0).rewards["agent"] for _ in range(3)]
        assert torch.equal(single.observations, triple.observations)
        assert step.rewards["agent"].item() == pytest.approx(sum(rewards).item())


def test_episode_ends_after_a_streak_without_rewards():
    env = make_started_env(no_reward_limit=15)
    streak, ends = 0, False
    while not ends:
        gas = 1.0 if int(env.steps) < 60 else -1.0  # then no new tiles, soon
        step = drive(env, 0.0, gas, -gas)
        streak = streak + 1 if step.rewards["agent"].item() < 0 else 0
        ends = bool(step.terminated)
        assert ends == (streak > 15)
    assert int(env.steps) > 60
    assert drive(env, 0.0, 1.0, -1.0).rewards["agent"].item() == 0
    env.reset()
    assert not drive(env, 0.0, -1.0, 1.0).terminated
    endless = make_started_env()
    assert not drive(endless, 0.0, -1.0, 1.0, steps=40).terminated


def test_leaving_the_field_costs_100_and_terminates():
    env = make_started_env(max_steps=2000)
    total = 0.0
    while not env.over:
        step = drive(env, 0.0, 0.0, -1.0)
        total += step.rewards["agent"].item()
    assert step.rewards["agent"].item() == -100
    assert step.terminated.item()
    assert total < 0
    assert int(env.steps) < 1000


# Backgrounds


@pytest.mark.parametrize("name", BACKGROUNDS)
def test_background_replaces_grass_but_not_road_or_car(moved_car, name):
    env = make_started_env(color="rgb", background=name)
    assert torch.equal(env.screens[:, -1], env._to_screens(env.observations))
    picture = find_background(name)
    assert picture is not None
    assert picture.shape == (96, 96, 3)
    assert picture.dtype == np.uint8
    before = moved_car.screens[0, -1].numpy()
    after = env._to_screens(moved_car.observations)[0].numpy()
    lawn = (before == (102, 204, 102)).all(-1) | (before == (102, 230, 102)).all(-1)
    assert lawn.mean() > 0.3
    assert np.array_equal(after[lawn], picture[lawn])
    red, green, blue = np.moveaxis(before.astype(int), -1, 0)
    ground = (green <= red) | (green <= blue)
    assert ground.mean() > 0.1
    assert np.array_equal(after[ground], before[ground])
    assert not np.array_equal(env.frame(), make_started_env(color="rgb").frame())


def test_backgrounds_differ_and_are_deterministic():
    pictures = [make() for make in BACKGROUNDS.values()]
    for i, make in enumerate(BACKGROUNDS.values()):
        assert np.array_equal(pictures[i], make())
        for picture in pictures[:i]:
            assert np.abs(pictures[i].astype(int) - picture).mean() > 20


def test_blended_grass_pixels_blend_the_background():
    screens = np.zeros((1, 96, 96, 3), np.uint8)
    colors = [
        ((102, 204, 102), (10, 20, 250)),  # grass
        ((100, 228, 100), (10, 20, 250)),  # lighter grass, averaged
        ((102, 153, 102), (56, 61, 176)),  # half of it road
        ((102, 102, 102), (102, 102, 102)),
        ((0, 255, 0), (0, 255, 0)),  # an instrument
        ((204, 0, 0), (204, 0, 0)),  # the car
        ((200, 90, 200), (200, 90, 200)),
    ]
    for column, (color, _) in enumerate(colors):
        screens[0, 5, column] = color
    picture = np.full((96, 96, 3), (10, 20, 250), np.uint8)
    pixels = replace_grass(screens, picture)[0, 5]
    for column, (_, expected) in enumerate(colors):
        assert tuple(pixels[column]) == expected


@pytest.mark.parametrize("channels", [3, 4])
def test_background_from_an_image_file(tmp_path, monkeypatch, channels):
    monkeypatch.setenv("HOME", str(tmp_path))
    image = np.zeros((40, 60, channels), np.uint8)
    image[:, :30, 0], image[:, 30:, 1] = 200, 150  # blue and green, for OpenCV
    image[..., 3:] = 255
    file = tmp_path / "mine.png"
    cv2.imwrite(str(file), image)
    picture = find_background("~/mine.png")
    assert picture is not None
    assert picture.shape == (96, 96, 3)
    assert tuple(picture[50, 5]) == (0, 0, 200)
    assert tuple(picture[50, 90]) == (0, 150, 0)
    env = make_started_env(background=str(file), color="rgb")
    assert (env.screens[0, -1] == torch.tensor([0, 0, 200])).all(-1).any()


# Pictures and bad input


def test_frame_shows_the_image_with_attended_patches_tinted():
    env = make_started_env(2)
    drive(env, 0.0, 0.0, -1.0)
    plain = env.frame(1, size=192)
    assert np.array_equal(plain[::2, ::2], env.observations[1].numpy())
    tinted = env.frame(1, attention=torch.eye(256)[16 * 5 + 3], size=192)
    changed = (tinted != plain).any(-1)
    assert changed[60:72, 36:48].all()
    assert changed.sum() == 144


def test_stronger_tint_wins_where_patches_overlap():
    env = make_started_env(**AGENT)
    weights = torch.zeros(529)
    weights[23 * 4 + 4], weights[23 * 4 + 5] = 0.2, 0.001
    image = env.frame(attention=weights, size=96).astype(int)
    strong = env.frame(attention=weights * (weights > 0.1), size=96).astype(int)
    changed = (image != strong).any(-1)
    assert not changed[16:23, 16:23].any()
    assert changed[16:23, 23:27].all()
    assert changed.sum() == 7 * 4


# Golden trajectory


def golden() -> dict[str, Any]:
    """Return checksums of the observations of two environments, and the rewards."""
    env = make_started_env(2, seed=7)
    sums, points = [], []
    for turn in range(6):
        actions = torch.tensor([[[0.1 * turn, 0.2, -1.0]], [[-0.2, 0.0, -0.9]]])
        total = torch.zeros(2, 1)
        for _ in range(10):
            total += env.step({"agent": actions}).rewards["agent"]
        features: Tensor = env.observe()["agent"].features
        sums.append([zlib.crc32(tokens.numpy().tobytes()) for tokens in features])
        points.append([round(number, 3) for number in total.flatten().tolist()])
    return {"version": env.version, "checksums": sums, "points": points}


def test_the_golden_trajectory_has_not_changed():
    assert golden() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden()) + "\n")
