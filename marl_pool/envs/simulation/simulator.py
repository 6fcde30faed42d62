"""Simulators of other people, many of them behind one batched call.

It imports no torch, since a process of its own may run it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
from gymnasium.error import DependencyNotInstalled

from marl_pool.utils.errors import InputError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the modules of the extra ``name`` in this context.

    SWIG's modules warn when imported, and take the process with them if a warning is
    an error.

    Raises:
        InputError: Gymnasium cannot import what its env needs.
        ModuleNotFoundError: a module is not installed.
    """
    with catch_warnings():
        simplefilter("ignore")
        try:
            yield
        except DependencyNotInstalled as error:
            said = " ".join(str(error).split())
            raise InputError(f'{said}: pip install "marl-pool[{name}]"') from error


class Simulator(ABC):
    """One copy of a simulator. An episode follows from its seed and the actions."""

    @abstractmethod
    def reset(self, seed: int) -> np.ndarray:
        """Begin the episode of ``seed`` in [0, 2^31); return the observation."""

    @abstractmethod
    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Act; return the observation, the reward, and whether the task ended."""


class Played(NamedTuple):
    """What some simulators return, in the order that they were asked in."""

    observations: np.ndarray
    """``(n, *shape)``."""
    rewards: np.ndarray
    """``(n,)`` float64, of the last step."""
    over: np.ndarray
    """``(n,)`` bool: the task ended."""


class Simulators:
    """Copies of a simulator, stepped one after the other.

    Args:
        build: builds one; a copy is built when its number is first used.
    """

    def __init__(self, build: Callable[[], Simulator]) -> None:
        self._build = build
        self._copies: dict[int, Simulator] = {}

    def begin(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        pasts: Sequence[Sequence[np.ndarray]],
    ) -> Played:
        """Begin episodes anew and repeat what was done in them.

        Args:
            numbers: of the copies, at least one.
            seeds: of their episodes, in [0, 2^31).
            pasts: the actions of each to repeat.
        """
        return _stacked(map(self._lead, numbers, seeds, pasts))

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> Played:
        """Step the copies ``numbers``, at least one, by ``actions`` ``(n, A)``."""
        copies = [self._copies[number] for number in numbers]
        pairs = zip(copies, actions, strict=True)
        return _stacked(copy.step(action) for copy, action in pairs)

    def _lead(
        self, number: int, seed: int, past: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, float, bool]:
        if number not in self._copies:
            self._copies[number] = self._build()
        copy = self._copies[number]
        outcome = copy.reset(seed), 0.0, False
        for action in past:
            outcome = copy.step(action)
        return outcome


def _stacked(outcomes: Iterator[tuple[Any, float, bool]]) -> Played:
    observations, rewards, over = zip(*outcomes, strict=True)
    return Played(np.stack(observations), np.array(rewards, float), np.array(over))
