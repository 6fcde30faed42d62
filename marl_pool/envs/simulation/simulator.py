"""Third-party simulators, several of them behind one batched call.

This module imports no torch, so that a process of simulators starts quickly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
from gymnasium.error import DependencyNotInstalled
from typing_extensions import override

from marl_pool.utils.errors import InputError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the modules of the optional dependencies ``name`` in this context.

    Warnings are suppressed: SWIG modules warn when imported, and crash the process if
    warnings are errors.

    Raises:
        InputError: Gymnasium cannot import a dependency of its environment.
    """
    with catch_warnings():
        simplefilter("ignore")
        try:
            yield
        except DependencyNotInstalled as error:
            message = " ".join(str(error).split())
            raise InputError(f'{message}: pip install "marl-pool[{name}]"') from error


class Simulator(ABC):
    """A simulator of one environment, deterministic given the seed and the actions."""

    @abstractmethod
    def reset(self, seed: int) -> np.ndarray:
        """Start the episode of ``seed`` in [0, 2^31); return the observation."""

    @abstractmethod
    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Return the observation, the reward and ``terminated``."""


@dataclass(eq=False)
class ActionLog:
    """The seed and the actions of an episode, which determine its present state.

    A log only grows, and is compared by identity. An action is a flat array.
    """

    seed: int
    actions: list[np.ndarray] = field(default_factory=list)


class SimulatorStep(NamedTuple):
    """Results of several simulators, in the order of the call's ``ids``."""

    observations: np.ndarray
    """``(n, *shape)``."""
    rewards: np.ndarray
    """``(n,)`` float64, of the last step."""
    terminated: np.ndarray
    """``(n,)`` bool."""


class SimulatorBackend(ABC):
    """Simulators addressed by integer ids, in this process or in another one."""

    @abstractmethod
    def replay(self, ids: Sequence[int], logs: Sequence[ActionLog]) -> SimulatorStep:
        """Reset simulators, at least one, and repeat the actions of their logs."""

    @abstractmethod
    def step(self, ids: Sequence[int], actions: np.ndarray) -> SimulatorStep:
        """Step simulators, at least one, by actions ``(n, A)``."""


class Simulators(SimulatorBackend):
    """Simulators that are stepped one after the other, built at their first use."""

    def __init__(self, build: Callable[[], Simulator]) -> None:
        self._build = build
        self._simulators: dict[int, Simulator] = {}

    @override
    def replay(self, ids: Sequence[int], logs: Sequence[ActionLog]) -> SimulatorStep:
        return _stack(map(self._replay_one, ids, logs))

    @override
    def step(self, ids: Sequence[int], actions: np.ndarray) -> SimulatorStep:
        pairs = zip(ids, actions, strict=True)
        return _stack(self._simulators[i].step(action) for i, action in pairs)

    def _replay_one(self, id_: int, log: ActionLog) -> tuple[np.ndarray, float, bool]:
        if id_ not in self._simulators:
            self._simulators[id_] = self._build()
        simulator = self._simulators[id_]
        result = simulator.reset(log.seed), 0.0, False
        for action in log.actions:
            result = simulator.step(action)
        return result


def _stack(results: Iterator[tuple[Any, float, bool]]) -> SimulatorStep:
    observations, rewards, terminated = zip(*results, strict=True)
    return SimulatorStep(
        np.stack(observations), np.array(rewards, float), np.array(terminated)
    )
