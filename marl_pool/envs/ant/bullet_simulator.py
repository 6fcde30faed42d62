"""PyBullet's AntBulletEnv-v0 as a `Simulator`, for a process of its own."""

import numpy as np

from marl_pool.envs.ant import gym_shim as bullet_gym_shim
from marl_pool.envs.simulation.simulator import Simulator

bullet_gym_shim.install()

from pybullet_envs.gym_locomotion_envs import AntBulletEnv  # noqa: E402  needs the shim

PARTS = [0, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19]
"""The links of the four legs, from the torso outwards; the others have no extent."""


class AntBulletSimulator(Simulator):
    """One ant; an observation is its 28 channels, then where its 13 parts are.

    Args:
        alive_bonus: False takes the bonus off, and what is then below 0.
    """

    def __init__(self, *, alive_bonus: bool) -> None:
        self._env = AntBulletEnv()
        # The first episode of all differs in the last digits from the same one later.
        self.reset(0)
        self._alive_bonus = alive_bonus

    def reset(self, seed: int) -> np.ndarray:
        """See `Simulator.reset`."""
        self._env.seed(seed)
        return self._seen(self._env.reset())

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Step by eight torques in [-1, 1]; see `Simulator.step`."""
        channels, reward, over, _ = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, sum(self._env.rewards[1:]))
        return self._seen(channels), float(reward), bool(over)

    def _seen(self, channels: np.ndarray) -> np.ndarray:
        client, body = self._env._p, self._env.robot.objects[0]
        torso, _ = client.getBasePositionAndOrientation(body)
        # The first entry of a link's state is the middle of its mass.
        links = [state[0] for state in client.getLinkStates(body, PARTS)]
        return np.concatenate([channels, np.ravel([torso, *links])])
