"""A cheap simulator."""

import numpy as np

from marl_pool.envs.simulation import Simulator, SimulatorStep


class Counter(Simulator[SimulatorStep]):
    """A simulator that shows its seed and the sum of its actions; it ends above 3."""

    built = 0

    def __init__(self) -> None:
        type(self).built += 1

    def reset(self, seed: int) -> SimulatorStep:
        self.seed, self.total = seed, 0.0
        return SimulatorStep(self._seen())

    def step(self, action: np.ndarray) -> SimulatorStep:
        self.total += float(action[0])
        return SimulatorStep(self._seen(), float(action[0]), self.total > 3)

    def _seen(self) -> np.ndarray:
        return np.array([self.seed % 4096, self.total])
