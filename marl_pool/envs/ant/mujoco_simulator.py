"""Gymnasium's Ant-v5 as a `Simulator`; importing this module needs MuJoCo."""

import numpy as np
from gymnasium.envs.mujoco.ant_v5 import AntEnv
from typing_extensions import override

from marl_pool.envs.simulation.env import SimulatorStep
from marl_pool.envs.simulation.simulator import Simulator


class AntSimulator(Simulator[SimulatorStep]):
    """One ant; an observation is its channels, then the positions of its 13 parts."""

    def __init__(self, *, contact_forces: bool, alive_bonus: bool) -> None:
        self._env = AntEnv(include_cfrc_ext_in_observation=contact_forces)
        self._alive_bonus = alive_bonus

    @override
    def reset(self, seed: int) -> SimulatorStep:
        return SimulatorStep(self._with_parts(self._env.reset(seed=seed)[0]))

    @override
    def step(self, action: np.ndarray) -> SimulatorStep:
        channels, reward, terminated, _, info = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, reward - info["reward_survive"])
        seen = self._with_parts(channels)
        return SimulatorStep(seen, float(reward), bool(terminated))

    def _with_parts(self, channels: np.ndarray) -> np.ndarray:
        # Geom 0 is the floor, then come the torso and the three parts of each leg.
        parts: np.ndarray = self._env.data.geom_xpos[1:]
        return np.concatenate([channels, parts.ravel()])
