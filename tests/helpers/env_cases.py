"""Options of each environment for tests of all of them."""

from typing import Any

import pytest

from marl_pool.envs import env_names

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "ant": {
        "plain": {"max_steps": 20},
        "contacts and frames": {
            "max_steps": 20,
            "contact_forces": True,
            "num_frames": 3,
            "channel_ids": True,
        },
    },
    "boxworld": {
        "entities": {"max_steps": 20},
        "pixels": {"max_steps": 20, "observation": "pixels"},
    },
    "car_racing": {
        "grey": {"max_steps": 20},
        "overlapping patches in color": {
            "max_steps": 20,
            "patch": 7,
            "stride": 4,
            "num_frames": 1,
            "color": "rgb",
            "background": "clouds",
        },
    },
    "cartpole": {
        "plain": {"max_steps": 20},
        "noise and frames": {
            "max_steps": 20,
            "duplicates": 2,
            "noise_channels": 2,
            "num_frames": 3,
            "channel_ids": True,
        },
    },
    "pettingzoo": {
        "mpe2 spread": {"module": "mpe2.simple_spread_v3", "options": {"N": 2}},
        "mpe2 tag": {
            "module": "mpe2.simple_tag_v3",
            "options": {"continuous_actions": True},
            "max_steps": 20,
        },
    },
    "simple_centroid": {
        "one agent": {"max_steps": 20},
        "three discrete agents": {
            "max_steps": 20,
            "num_agents": 3,
            "continuous_actions": False,
        },
    },
    "simple_spread": {
        "three agents": {"max_steps": 20},
        "continuous actions": {
            "max_steps": 20,
            "num_agents": 2,
            "num_landmarks": 3,
            "continuous_actions": True,
        },
    },
    "simple_tag": {
        "one predator": {"max_steps": 20},
        "prey that learn": {
            "max_steps": 20,
            "counts": "2-2-3",
            "prey": "learned",
            "continuous_actions": True,
        },
    },
}
"""Variants of each environment, by name."""
CASES = [
    pytest.param(name, options, id=f"{name}, {variant}")
    for name in env_names()
    for variant, options in OPTIONS.get(name, {"default": {"max_steps": 20}}).items()
]
