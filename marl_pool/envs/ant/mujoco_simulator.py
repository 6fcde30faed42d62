"""Gymnasium's Ant-v5 as a `Simulator`; imported where MuJoCo is."""

import numpy as np
from gymnasium.envs.mujoco.ant_v5 import AntEnv

from marl_pool.envs.simulation.simulator import Simulator


class AntSimulator(Simulator):
    """One ant; an observation is its channels, then where its 13 parts are.

    Args:
        contact_forces: whether there are channels for them.
        alive_bonus: False takes the bonus off, and what is then below 0.
    """

    def __init__(self, *, contact_forces: bool, alive_bonus: bool) -> None:
        self._env = AntEnv(include_cfrc_ext_in_observation=contact_forces)
        self._alive_bonus = alive_bonus

    def reset(self, seed: int) -> np.ndarray:
        """See `Simulator.reset`."""
        return self._seen(self._env.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Step by eight torques in [-1, 1]; see `Simulator.step`."""
        channels, reward, over, _, about = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, reward - about["reward_survive"])
        return self._seen(channels), float(reward), bool(over)

    def _seen(self, channels: np.ndarray) -> np.ndarray:
        # The first geom is the floor; then come the torso and each leg's three parts.
        parts: np.ndarray = self._env.data.geom_xpos[1:]
        return np.concatenate([channels, parts.ravel()])
