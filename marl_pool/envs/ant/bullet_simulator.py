"""PyBullet's AntBulletEnv-v0 as a `Simulator`, for a separate process."""

import numpy as np
from typing_extensions import override

from marl_pool.envs.ant import gym_shim
from marl_pool.envs.simulation.simulator import Simulator

gym_shim.install()

from pybullet_envs.gym_locomotion_envs import AntBulletEnv  # noqa: E402  needs the shim

PARTS = [0, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19]
"""Links of the four legs, from the torso outwards; the other links have no extent."""


class AntBulletSimulator(Simulator):
    """One ant; an observation is its channels, then the positions of its 13 parts."""

    def __init__(self, *, alive_bonus: bool) -> None:
        self._env = AntBulletEnv()
        # The first episode after construction differs in the last digits from later
        # episodes of the same seed, so discard it.
        self.reset(0)
        self._alive_bonus = alive_bonus

    @override
    def reset(self, seed: int) -> np.ndarray:
        self._env.seed(seed)
        return self._with_parts(self._env.reset())

    @override
    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        channels, reward, terminated, _ = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, sum(self._env.rewards[1:]))
        return self._with_parts(channels), float(reward), bool(terminated)

    def _with_parts(self, channels: np.ndarray) -> np.ndarray:
        client, body = self._env._p, self._env.robot.objects[0]
        torso, _ = client.getBasePositionAndOrientation(body)
        # The first entry of a link's state is its center of mass.
        links = [state[0] for state in client.getLinkStates(body, PARTS)]
        return np.concatenate([channels, np.ravel([torso, *links])])
