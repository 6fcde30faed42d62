"""Options that no environment can have are refused by their key."""

import math

import pytest

from marl_pool.envs import make_batched_env
from marl_pool.utils.errors import InputError

WRONG = {
    "ant": [("num_frames", 0, "an integer >= 1, got 0")],
    "ant_bullet": [("num_frames", 0, "an integer >= 1, got 0")],
    "boxworld": [
        ("n", 2, r"an integer in \[3, 32\], got 2"),
        ("n", 33, r"an integer in \[3, 32\], got 33"),
        ("n", 4, "room for 3 boxes that don't touch .*, got 4: at most 1"),
        ("goal_length", 1, "an integer >= 2, got 1"),
        ("num_distractors", -1, "an integer >= 0, got -1"),
        ("distractor_length", 0, "an integer >= 1, got 0"),
        ("observation", "image", "entities or pixels, got 'image'"),
    ],
    "car_racing": [
        ("patch", 0, r"an integer in \[1, 96\], got 0"),
        ("patch", 97, r"an integer in \[1, 96\], got 97"),
        ("stride", 0, r"an integer in \[1, 96\], got 0"),
        ("num_frames", 0, "an integer >= 1, got 0"),
        ("color", "blue", "grey or rgb, got 'blue'"),
        ("zero_rows_bottom", 97, r"an integer in \[0, 96\], got 97"),
        ("zero_rows_bottom", -1, r"an integer in \[0, 96\], got -1"),
        ("action_repeat", 0, "an integer >= 1, got 0"),
        ("no_reward_limit", -1, "an integer >= 0, got -1"),
        ("lap_complete_percent", 1.5, r"a number in \[0, 1\], got 1.5"),
        ("background", "sky", "one of none, checkers.*'sky'.*"),
        ("background", __file__, "an image, got .*"),
    ],
    "cartpole": [
        ("duplicates", 0, "an integer >= 1, got 0"),
        ("noise_channels", -1, "an integer >= 0, got -1"),
        ("noise_std", -0.1, "a number >= 0, got -0.1"),
        ("noise_std", math.nan, "a number >= 0, got nan"),
        ("noise_std", math.inf, "a number >= 0, got inf"),
        ("num_frames", 0, "an integer >= 1, got 0"),
        ("start_speed", -1.0, "a number >= 0, got -1.0"),
        ("start_speed", math.nan, "a number >= 0, got nan"),
        ("start_angle", -0.1, "an angle in .*"),
        ("start_angle", 3.2, "an angle in .*"),
        ("start_angle", math.nan, "an angle in .*"),
    ],
    "pong": [
        ("frame_skip", 0, "an integer >= 1, got 0"),
        ("num_frames", 0, "an integer >= 1, got 0"),
        ("patch", 5, "a divisor of 84, got 5"),
        ("patch", 0, "an integer >= 1, got 0"),
        ("noop_max", -1, "an integer >= 0, got -1"),
        ("sticky_actions", 1.0, "a number in .*, got 1.0"),
        ("sticky_actions", math.nan, "a number in .*, got nan"),
        ("zero_rows", 85, r"an integer in \[0, 84\], got 85"),
        ("actions", "all", "minimal or moves, got 'all'"),
        ("threads", -1, "an integer >= 0, got -1"),
    ],
    "simple_centroid": [
        ("num_agents", 0, ".* >= 1 or null, got 0"),
        ("num_signal", 0, ".* >= 1 or null, got 0"),
        ("num_noise", -1, ".* >= 0 or null, got -1"),
        ("reward_scale", 0.0, ".* > 0, got 0.0"),
        ("reward_scale", math.nan, ".* > 0, got nan"),
        ("noise_offset", -0.1, ".* >= 0, got -0.1"),
        ("spread", 0.0, ".* > 0 or null, got 0.0"),
        ("spread", math.inf, ".* > 0 or null, got inf"),
    ],
    "simple_tag": [
        ("counts", "1-3", "three numbers such as 1-3-28, got '1-3'"),
        ("num_predators", 0, ".* >= 1 or null, got 0"),
        ("num_prey", 0, ".* >= 1 or null, got 0"),
        ("num_obstacles", -1, ".* >= 0 or null, got -1"),
        ("prey", "run", "random, flee or learned, got 'run'"),
        ("obstacle_spread", 0.0, ".* number > 0 or null, got 0.0"),
        ("obstacle_spread", math.inf, ".* got inf"),
    ],
}
SHARED = [(key, 0, "an integer >= 1, got 0") for key in ("max_steps", "num_envs")]


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [(name, *row) for name, rows in WRONG.items() for row in rows + SHARED],
)
def test_they_are_refused_by_their_key(name, key, value, expected):
    with pytest.raises(InputError, match=rf"^env\.{key}: expected {expected}$"):
        make_batched_env(name, **{"num_envs": 1, key: value})


@pytest.mark.parametrize(
    ("counts", "key"), [("0-3-2", "num_predators"), ("1-0-2", "num_prey")]
)
def test_counts_that_are_too_small_name_what_is_counted(counts, key):
    with pytest.raises(InputError, match=rf"^env.counts: {key}: .* >= 1"):
        make_batched_env("simple_tag", 1, counts=counts)
