"""Pictures from environments as bytes of RGB: scaled, or refused in one line."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.rule_breaker import Breaker
from marl_pool.envs.drawing.frames import fit_square, to_rgb
from marl_pool.envs.particles.simple_centroid import SimpleCentroid
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.utils.errors import InputError


def full(value: Any, dtype: Any = None) -> np.ndarray:
    return np.full((4, 6, 3), value, dtype)


ACCEPTED = {
    "bytes": (full(7, np.uint8), 7),
    "share": (full(0.75, np.float32), 191),
    "half share": (full(1.0, np.float16), 255),
    "rounded share": (full(1.0000001), 255),
    "booleans": (full(True), 255),
    "black booleans": (full(False), 0),
    "black floats": (full(0.0), 0),
    "floats to 255": (full(200.4), 200),
    "rounded floats": (full(255.0001), 255),
    "integers": (full(255, np.int64), 255),
    "bytes of 0 and 1": (full(1, np.uint8), 255),
    "integers of 0 and 1": (full(1, np.int64), 255),
    "black integers": (full(0, np.int64), 0),
    "a tensor": (torch.full((4, 6, 3), 0.5), 128),
    "lists": (full(9, np.int64).tolist(), 9),
}
REFUSED = {
    "negative": (full(-1, np.int64), "got int64 from -1 to -1"),
    "negative floats": (full(-0.5), "got float64 from -0.5 to -0.5"),
    "above 255": (full(256, np.uint16), "got uint16 from 256 to 256"),
    "floats above 255": (full(300.0), "got float64 from 300 to 300"),
    "neither range": (full(1.5), "got float64 from 1.5 to 1.5"),
    "NaN": (full(np.nan), "got float64 from nan to nan"),
    "infinite": (full(np.inf), "got float64 from inf to inf"),
    "empty": (np.zeros((0, 6, 3)), "shape (height, width, 3), got (0, 6, 3)"),
    "gray": (np.zeros((4, 6)), "shape (height, width, 3), got (4, 6)"),
    "with opacity": (np.zeros((4, 6, 4)), "(height, width, 3), got (4, 6, 4)"),
    "channels first": (np.zeros((3, 4, 6)), "(height, width, 3), got (3, 4, 6)"),
    "none": (None, "expected an array of numbers, got None"),
    "text": ("frame.png", "expected an array of numbers, got a str"),
    "uneven": ([[1], [2, 3]], "expected an array of numbers, got a list"),
    "complex": (full(1j), "expected an array of numbers, got a ndarray"),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_picture_is_scaled_to_bytes(kind):
    image, expected = ACCEPTED[kind]
    rgb = to_rgb(image)
    assert rgb.dtype == np.uint8
    assert np.array_equal(rgb, full(expected, np.uint8))


@pytest.mark.parametrize("kind", REFUSED)
def test_other_pictures_are_refused_in_one_line(kind):
    image, expected = REFUSED[kind]
    with pytest.raises(InputError) as caught:
        to_rgb(image)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frames_of_the_right_size_are_copied():
    image = np.zeros((8, 8, 3), np.uint8)
    fit_square(image, 8)[...] = 1
    assert not image.any()


class Painted(SimpleCentroid):
    """A batched env that draws ``picture``."""

    picture: Any = None

    def draw(self, index, size, weights, group, agent):
        return self.picture


class Shown(Breaker):
    """A PettingZoo env that renders ``picture``."""

    picture: Any = None

    def render(self):
        if isinstance(self.picture, Exception):
            raise self.picture
        return self.picture


@pytest.mark.parametrize(
    ("image", "expected"),
    [(full(0.75), 191), (full(True), 255), (full(np.nan), "cannot be drawn: expected")],
)
@pytest.mark.parametrize("source", [Painted, Shown])
def test_frames_of_any_env_are_converted(monkeypatch, source, image, expected):
    monkeypatch.setattr(source, "picture", image)
    is_batched = source is Painted
    env = Painted(1) if is_batched else PettingZooEnv(1, module=f"{__name__}:Shown")
    env.reset()
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            env.frame(size=64)
        return
    frame = env.frame(size=64)
    assert (frame.shape, frame.dtype) == ((64, 64, 3), np.uint8)
    assert (frame[32, 32] == expected).all()


def test_a_render_that_raises_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(Shown, "picture", OSError("no\ndisplay"))
    env = PettingZooEnv(1, module=f"{__name__}:Shown")
    env.reset()
    with pytest.raises(InputError) as caught:
        env.frame()
    line = str(caught.value)
    assert f"{__name__}:Shown cannot be drawn: OSError: no display (" in line
    assert "test_frames.py:" in line
