"""Third-party simulators, whose state is the log of their episode."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar
from warnings import catch_warnings, simplefilter

import numpy as np
from gymnasium.error import DependencyNotInstalled

from marl_pool.utils.errors import InputError

Result = TypeVar("Result")
"""Result of a simulator's reset, and of its step."""


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


class Simulator(ABC, Generic[Result]):
    """A simulator of one environment, deterministic given the seed and the actions."""

    @abstractmethod
    def reset(self, seed: int) -> Result:
        """Start the episode of ``seed`` in [0, 2^31)."""

    @abstractmethod
    def step(self, action: np.ndarray) -> Result:
        """Step by a flat array."""


@dataclass(eq=False)
class ActionLog:
    """The seed and the actions of an episode, which determine its present state.

    A log only grows, and is compared by identity. An action is a flat array.
    """

    seed: int
    actions: list[np.ndarray] = field(default_factory=list)


class LoggedSimulator(Generic[Result]):
    """A simulator in the state at the end of its log; None before the first episode."""

    def __init__(self, inner: Simulator[Result]) -> None:
        self.inner = inner
        self.log: ActionLog | None = None

    def replay(self, log: ActionLog) -> Result:
        """Reset, and repeat the actions of ``log``; later steps are added to it."""
        result = self.inner.reset(log.seed)
        for action in log.actions:
            result = self.inner.step(action)
        self.log = log
        return result

    def step(self, action: np.ndarray) -> Result:
        """Step, and log the action."""
        assert self.log is not None, "step before reset"
        result = self.inner.step(action)
        self.log.actions.append(action)
        return result


class ReplayCursor(NamedTuple, Generic[Result]):
    """The state of an environment: after the first ``length`` actions of a log.

    Environments made by `BatchedEnv.select` share simulators. The first one to be
    stepped continues with the simulator; the others replay the episode in another one.
    """

    simulator: LoggedSimulator[Result]
    log: ActionLog
    length: int

    @property
    def in_sync(self) -> bool:
        """True if the simulator is in this state."""
        return self.simulator.log is self.log and len(self.log.actions) == self.length

    def prefix(self) -> ActionLog:
        """Return a copy of the log up to this state."""
        return ActionLog(self.log.seed, self.log.actions[: self.length])
