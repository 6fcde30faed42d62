"""PyBullet's AntBulletEnv-v0 as a `Simulator`; importing this module needs PyBullet."""

import numpy as np
from typing_extensions import override

from marl_pool.envs.ant.gym_shim import gym_shim
from marl_pool.envs.simulation.env import SimulatorStep
from marl_pool.envs.simulation.simulator import Simulator
from marl_pool.utils.silence import silenced

with gym_shim(), silenced():
    from pybullet_envs.gym_locomotion_envs import AntBulletEnv

PARTS = [0, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19]
"""Links of the four legs, from the torso outwards; the other links have no extent."""


class AntBulletSimulator(Simulator[SimulatorStep]):
    """One ant; an observation is its channels, then the positions of its 13 parts."""

    def __init__(self, *, alive_bonus: bool) -> None:
        self._alive_bonus = alive_bonus
        with silenced():
            self._env = AntBulletEnv()
            # The first episode after construction differs in the last digits from later
            # episodes of the same seed, so discard it.
            self.reset(0)

    @override
    def reset(self, seed: int) -> SimulatorStep:
        self._env.seed(seed)
        return SimulatorStep(self._with_parts(self._env.reset()))

    @override
    def step(self, action: np.ndarray) -> SimulatorStep:
        channels, reward, terminated, _ = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, sum(self._env.rewards[1:]))
        seen = self._with_parts(channels)
        return SimulatorStep(seen, float(reward), bool(terminated))

    def _with_parts(self, channels: np.ndarray) -> np.ndarray:
        client, body = self._env._p, self._env.robot.objects[0]
        torso, _ = client.getBasePositionAndOrientation(body)
        # The first entry of a link's state is its center of mass.
        links = [state[0] for state in client.getLinkStates(body, PARTS)]
        return np.concatenate([channels, np.ravel([torso, *links])])
