"""Options of each environment, for tests that cover all environments."""

from typing import Any

import pytest

from marl_pool.envs import env_names

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "ant": {
        "plain": {},
        "contacts and frames": {
            **{"contact_forces": True, "num_frames": 3, "channel_ids": True}
        },
    },
    "boxworld": {"entities": {}, "pixels": {"observation": "pixels"}},
    "car_racing": {
        "grey": {},
        "overlapping patches in color": {
            **{"patch": 7, "stride": 4, "num_frames": 1},
            **{"color": "rgb", "background": "clouds"},
        },
    },
    "cartpole": {
        "plain": {},
        "noise and frames": {
            **{"duplicates": 2, "noise_channels": 2},
            **{"num_frames": 3, "channel_ids": True},
        },
    },
    "lbforaging": {
        "moves": {"max_steps": 20},
        "food": {"choices": "food", "num_agents": 3, "sight": 2, "max_steps": 20},
    },
    "pettingzoo": {
        "mpe2 spread": {"module": "mpe2.simple_spread_v3", "options": {"N": 2}},
        "mpe2 tag": {
            "module": "mpe2.simple_tag_v3",
            "options": {"continuous_actions": True},
        },
    },
    "mpev2_guard": {"more agents": {"domain": 1, "margin": 0}},
    "simple_adversary": {"two agents": {"max_steps": 20}},
    "simple_centroid": {
        "one agent": {},
        "three discrete agents": {"num_agents": 3, "continuous_actions": False},
    },
    "simple_push": {"continuous actions": {"continuous_actions": True}},
    "simple_reference": {
        "fifty choices": {"max_steps": 20},
        "continuous actions": {"max_steps": 20, "continuous_actions": True},
    },
    "simple_speaker_listener": {
        "two choices": {"max_steps": 20},
        "continuous actions": {"max_steps": 20, "continuous_actions": True},
    },
    "simple_spread": {
        "three agents": {"max_steps": 20},
        "continuous actions": {
            "max_steps": 20,
            "num_agents": 2,
            "num_landmarks": 3,
            "continuous_actions": True,
        },
        "agents that come and go": {
            "max_steps": 20,
            "arrivals": [{"step": [2, 4]}],
            "departures": [{"step": [3, 4]}, {"type": "landmark", "step": 3}],
        },
    },
    "simple_tag": {
        "one predator": {},
        "prey that learn": {
            **{"counts": "2-2-3", "prey": "learned", "continuous_actions": True}
        },
    },
    "simple_world_comm": {"six agents": {"max_steps": 20}},
}
CASES = [
    pytest.param(name, {"max_steps": 20, **options}, id=f"{name}, {variant}")
    for name in env_names()
    for variant, options in OPTIONS.get(name, {"default": {}}).items()
]
