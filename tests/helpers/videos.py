"""A small environment, a policy for it, and the frames of a video file."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.target import to_float64
from marl_pool.policies import make_policy
from marl_pool.policies.base import Policy

ENV: dict[str, Any] = {"name": "simple_centroid", "num_noise": 4, "max_steps": 5}
STEPS, PLACES = 5, 8


def centroid(count: int = 1) -> BatchedEnv:
    return make_batched_env(num_envs=count, **ENV)


def policy_for(env: BatchedEnv, pooling: Any = "ada") -> Policy:
    group = env.groups["agent"]
    policy = make_policy(
        group.tokens, group.action_space, pooling=pooling, init_std=0.4, seed=1
    )
    return to_float64({"agent": policy})["agent"]


def read(path: Path) -> list[np.ndarray]:
    capture = cv2.VideoCapture(str(path))
    images = []
    while True:
        success, image = capture.read()
        if not success:
            return images
        images.append(image[..., ::-1])
