"""Attention weights drawn into frames of any source."""

import numpy as np
import pytest
import torch

from marl_pool import InputError, draw_attention
from marl_pool.envs.drawing.attention import HEAD_COLORS

pytest.importorskip("cv2")
FRAME = np.random.default_rng(0).integers(0, 256, (80, 120, 3), np.uint8)
POSITIONS = np.array([[20.0, 20.0], [90.0, 20.0], [60.0, 60.0]])


def changed(drawn: np.ndarray) -> np.ndarray:
    return (drawn != FRAME).any(-1)


def test_rings_surround_the_entities_by_weight():
    black = np.zeros_like(FRAME)
    drawn = draw_attention(black, POSITIONS, [0.0, 0.1, 0.9], radius=10)
    assert drawn.shape == black.shape
    assert drawn.dtype == np.uint8
    assert not black.any()
    # Nothing around a weight of 0, a faint ring, and a strong one; centers stay.
    widths = [
        (drawn[y - 16 : y + 17, x - 16 : x + 17] > 0).any(-1).sum()
        for x, y in POSITIONS.astype(int)
    ]
    assert widths[0] == 0 < widths[1] < widths[2]
    assert drawn[70, 60].sum() > drawn[30, 90].sum() > 0
    assert not drawn[60, 60].any()
    assert not drawn[20, 90].any()


def test_lines_lead_from_the_observer():
    drawn = draw_attention(FRAME, POSITIONS, [0.5, 0.5, 0.0], observer=POSITIONS[0])
    marked = changed(drawn)
    # Along y = 20 from x = 20 to x = 90, a halo at the observer, and nothing else.
    assert marked[20, 30:85].all()
    assert not marked[40:].any()
    assert marked[10:30, 20].sum() > marked[10:30, 60].sum()


def test_heads_have_colors_side_by_side():
    black = np.zeros_like(FRAME)
    weights = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    drawn = draw_attention(black, POSITIONS, weights, observer=(20, 20))
    column = drawn[:, 55].astype(float)
    for color in HEAD_COLORS[:2]:
        share = column @ color / np.maximum(np.linalg.norm(column, axis=1), 1e-9)
        assert share.max() == pytest.approx(np.linalg.norm(color), rel=1e-2)


def test_entities_without_a_position_are_not_drawn():
    positions = np.vstack([POSITIONS, [[np.nan, 5.0], [5.0, np.nan], [9.0, 70.0]]])
    weights = np.array([0.0, 0.9, 0.1, 0.5, np.nan, np.nan])
    # A weight of an entity without a place does not count as one of uniform attention.
    expected = draw_attention(FRAME, POSITIONS, [0.0, 0.9, 0.1])
    np.testing.assert_array_equal(draw_attention(FRAME, positions, weights), expected)
    nobody = draw_attention(FRAME, np.zeros((0, 2)), np.zeros(0))
    np.testing.assert_array_equal(nobody, FRAME)
    far = draw_attention(FRAME, [[1e9, -1e9]], [1.0])
    np.testing.assert_array_equal(far, FRAME)


def test_tensors_and_float_frames_are_accepted():
    weights = torch.tensor([0.2, 0.3, 0.5], requires_grad=True)
    drawn = draw_attention(FRAME, torch.from_numpy(POSITIONS), weights)
    np.testing.assert_array_equal(
        drawn, draw_attention(FRAME / 255, POSITIONS, weights.tolist())
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame": FRAME[..., 0]}, "frame: expected a picture of shape"),
        ({"positions": POSITIONS[0]}, r"positions: expected the shape \(N, 2\)"),
        ({"positions": [[1, 2], [3]]}, "positions: expected numbers of the shape"),
        ({"weights": [1.0]}, r"weights: expected the shape \(3,\) or \(heads, 3\)"),
        ({"weights": np.zeros((1, 1, 3))}, r"weights: .*got \(1, 1, 3\)"),
        ({"weights": [0.5, -0.1, 0.6]}, "weights: expected finite numbers"),
        ({"weights": [0.5, np.inf, 0.6]}, "weights: expected finite numbers"),
        ({"weights": "abc"}, "weights: expected numbers"),
        ({"observer": [1.0]}, "observer: expected x and y"),
        ({"observer": [np.nan, 1.0]}, "observer: expected x and y"),
        ({"radius": -1.0}, "radius: expected a number of at least 0, got -1.0"),
        ({"radius": "a"}, "radius: expected a number of at least 0, got 'a'"),
    ],
)
def test_wrong_arguments(options, message):
    arguments = {"frame": FRAME, "positions": POSITIONS, "weights": np.ones(3) / 3}
    with pytest.raises(InputError, match=message):
        draw_attention(**arguments | options)
