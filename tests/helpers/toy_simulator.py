"""Cheap simulators and their environment, importable by another process."""

from typing import Any

import numpy as np

from marl_pool.envs.simulation.simulator import Simulator


class Counter(Simulator):
    """It shows its seed and the sum of what was done; it ends when that is above 3."""

    built = 0

    def __init__(self) -> None:
        type(self).built += 1
        print("chatter")

    def reset(self, seed: int) -> np.ndarray:
        self.seed, self.total = seed, 0.0
        return self._seen()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        if action[0] < -0.9:
            raise FloatingPointError("it burst", float(action[0]))
        self.total += float(action[0])
        return self._seen(), float(action[0]), self.total > 3

    def _seen(self) -> np.ndarray:
        return np.array([self.seed % 4096, self.total])


class Unsendable(Exception):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__("cannot be rebuilt from its arguments")


class Broken(Simulator):
    """It raises what cannot be pickled."""

    def reset(self, seed: int) -> np.ndarray:
        raise Unsendable(seed, seed)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        raise AssertionError("never begun")
