"""Batches of environments around third-party simulators.

A simulator cannot save its state. The state of its environment is therefore the log of
the episode, the seed and the actions, which are replayed when needed.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, BatchedEnv, EnvOptions
from marl_pool.options.types import Episodes
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform

Result = TypeVar("Result")
"""Result of a simulator's reset and of its step."""


class Simulator(ABC, Generic[Result]):
    """A simulator of one environment, deterministic given the seed and the actions."""

    @abstractmethod
    def reset(self, seed: int) -> Result:
        """Start the episode of ``seed`` in [0, 2^31)."""

    @abstractmethod
    def step(self, action: np.ndarray) -> Result:
        """Take one step with a flat action array."""

    def replay(self, seed: int, actions: Sequence[np.ndarray]) -> Result:
        """Start an episode, take all ``actions`` and return the last result."""
        result = self.reset(seed)
        for action in actions:
            result = self.step(action)
        return result


@dataclass(eq=False)
class ActionLog:
    """The seed and the actions of an episode, which determine its current state.

    A log only grows, and is compared by identity. An action is a flat array.
    """

    seed: int
    actions: list[np.ndarray] = field(default_factory=list)


class LoggedSimulator(Generic[Result]):
    """A simulator in the state at the end of ``log``, None before the first episode."""

    def __init__(self, inner: Simulator[Result]) -> None:
        self.inner = inner
        self.log: ActionLog | None = None

    def replay(self, log: ActionLog) -> Result:
        """Reset and repeat the actions of ``log``, to which later steps are added."""
        result = self.inner.replay(log.seed, log.actions)
        self.log = log
        return result

    def step(self, action: np.ndarray) -> Result:
        """Step, and log the action."""
        assert self.log is not None, "step before reset"
        result = self.inner.step(action)
        self.log.actions.append(action)
        return result


class ReplayCursor(NamedTuple, Generic[Result]):
    """The state of an environment after the first ``length`` actions of a log.

    Environments made by `BatchedEnv.select` share simulators. The first one to be
    stepped continues with the simulator; the others replay the episode in another one.
    """

    simulator: LoggedSimulator[Result] | None
    """None in a copy of an environment, whose next step replays the episode."""
    log: ActionLog
    length: int

    @property
    def in_sync(self) -> bool:
        """True if the simulator is in this state."""
        simulator, log = self.simulator, self.log
        return (
            simulator is not None
            and simulator.log is log
            and len(log.actions) == self.length
        )

    def prefix(self) -> ActionLog:
        """Return a copy of the log up to this state."""
        return ActionLog(self.log.seed, self.log.actions[: self.length])


def reset_seeds(keys: Tensor) -> list[int]:
    """Sample one seed in [0, 2^31) from each reset stream."""
    return (uniform(keys, 1)[:, 0] * (1 << 31)).long().tolist()


class ReplayedEnv(BatchedEnv, Generic[Result]):
    """A batch of environments with one simulator each, whose states are replay cursors.

    An episode must be determined by its seed and the actions. The actions are logged,
    and replayed when a state is loaded and when both an environment and one selected
    from it are stepped: loading a state at step t costs t simulator steps.

    Args:
        build: builds a simulator.
    """

    simulated = True

    def __init__(
        self,
        num_envs: Episodes,
        *,
        build: Callable[[], Simulator[Result]],
        max_steps: Episodes,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **common)
        self._new_simulator = build
        self._cursors: list[ReplayCursor[Result] | None] = [None] * num_envs
        # Simulators that no environment uses, shared with batches that `select` copies.
        self._spare: list[Simulator[Result]] = []

    @override
    def select(self, indices: Tensor) -> Self:
        selected = super().select(indices)
        selected._cursors = [self._cursors[row] for row in indices.tolist()]
        return selected

    @override
    def state_dict(self) -> dict[str, Any]:
        logs = [cursor and cursor.prefix() for cursor in self._cursors]
        # Plain tuples, so that a checkpoint does not depend on this module.
        saved = [log and (log.seed, log.actions) for log in logs]
        return {**super().state_dict(), "action_logs": saved}

    @override
    def __getstate__(self) -> dict[str, Any]:
        cursors = [
            cursor and ReplayCursor(None, cursor.prefix(), cursor.length)
            for cursor in self._cursors
        ]
        return {**self.__dict__, "_cursors": cursors, "_spare": []}

    def _replay_saved(self, state: Mapping[str, Any]) -> dict[int, Result]:
        """Replay the episodes of a `state_dict`; return their last results by row."""
        self._cursors = [None] * self.num_envs
        return {
            row: self._replay(row, ActionLog(saved[0], list(saved[1])))
            for row, saved in enumerate(state["action_logs"])
            if saved is not None
        }

    def _replay(self, row: int, log: ActionLog) -> Result:
        """Bring an environment to the end of ``log``, in its simulator if in sync."""
        cursor = self._cursors[row]
        simulator = cursor.simulator if cursor and cursor.in_sync else None
        simulator = simulator or self._acquire()
        result = simulator.replay(log)
        self._cursors[row] = ReplayCursor(simulator, log, len(log.actions))
        return result

    def _step_one(self, row: int, action: np.ndarray) -> Result:
        cursor = self._cursors[row]
        if cursor is None:
            raise InputError(
                f"step: expected a reset of each environment before it, got none of "
                f"environment {row}"
            )
        # Another batch may have stepped the simulator.
        if not cursor.in_sync:
            self._replay(row, cursor.prefix())
            cursor = self._cursors[row]
            assert cursor is not None
        assert cursor.simulator is not None
        result = cursor.simulator.step(action)
        self._cursors[row] = cursor._replace(length=cursor.length + 1)
        return result

    def _acquire(self) -> LoggedSimulator[Result]:
        """Return an unused simulator, spare again once no environment refers to it."""
        inner = self._spare.pop() if self._spare else self._new_simulator()
        simulator = LoggedSimulator(inner)
        weakref.finalize(simulator, self._spare.append, inner).atexit = False
        return simulator


class SimulatorStep(NamedTuple):
    """Result of a reset or a step of one simulator; a reset has no reward."""

    observation: np.ndarray
    reward: float = 0.0
    terminated: bool = False


class SimulatedEnv(ReplayedEnv[SimulatorStep]):
    """A batch of environments with one simulator each and one group of one agent.

    The seed of an episode comes from the environment's reset stream. A terminated
    environment keeps its observation, with reward 0, until the next reset.

    Args:
        shape: shape of an observation.
        observation_dtype: dtype of the observations.
    """

    state_names: ClassVar[tuple[str, ...]] = ("observations", "over")
    observations: Tensor
    """``(num_envs, *shape)``, the simulators' latest observations."""
    over: Tensor
    """``(num_envs,)`` bool: the episode has terminated."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        build: Callable[[], Simulator[SimulatorStep]],
        shape: tuple[int, ...],
        observation_dtype: torch.dtype,
        max_steps: Episodes,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(num_envs, build=build, max_steps=max_steps, **common)
        self.observations = torch.zeros(
            num_envs, *shape, dtype=observation_dtype, device=self.device
        )
        self.over = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    @abstractmethod
    def _to_native(self, actions: Tensor) -> Tensor:
        """Convert the agents' actions ``(num_envs, A)`` to the simulators' actions."""

    def _update_frames(self, rows: Tensor, *, first: bool) -> None:
        """Update frame stacks after new ``observations[rows]``; see `push_frames`."""

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        steps = self._replay_saved(state)
        if not steps:  # saved before the first reset
            return
        # A replay that ends elsewhere would silently continue another episode.
        replayed = self._observations_of(list(steps.values()))
        if not torch.equal(replayed, self.observations[list(steps)]):
            raise InputError(
                f"env {type(self).__name__}: expected the observations of the saved "
                "state after a replay, got different ones: use the version of the "
                "simulator that saved it"
            )

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        if not len(rows):
            return
        seeds = zip(rows.tolist(), reset_seeds(keys), strict=True)
        steps = [self._replay(row, ActionLog(seed)) for row, seed in seeds]
        self.over = self.over.index_fill(0, rows, False)
        self._observe_steps(rows, steps, first=True)

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        rewards = torch.zeros(self.num_envs, 1, dtype=self.dtype, device=self.device)
        rows = (~self.over).nonzero()[:, 0]
        (name,) = self.groups
        if len(rows):
            native = self._to_native(actions[name].detach()[:, 0])[rows].cpu().numpy()
            moves = zip(rows.tolist(), native, strict=True)
            steps = [self._step_one(row, action) for row, action in moves]
            terminated = self._constant([step.terminated for step in steps], torch.bool)
            self.over = self.over.index_copy(0, rows, terminated)
            self._observe_steps(rows, steps, first=False)
            earned = self._constant([step.reward for step in steps])
            rewards.index_copy_(0, rows, earned[:, None])
        return {name: rewards}, self.over

    def _observe_steps(
        self, rows: Tensor, steps: Sequence[SimulatorStep], *, first: bool
    ) -> None:
        # Replace tensors, since a caller may keep those that it was given.
        newest = self._observations_of(steps)
        self.observations = self.observations.index_copy(0, rows, newest)
        self._update_frames(rows, first=first)

    def _observations_of(self, steps: Sequence[SimulatorStep]) -> Tensor:
        newest = np.array([step.observation for step in steps])
        return self._constant(newest, self.observations.dtype)


def push_frames(stacks: Tensor, rows: Tensor, frames: Tensor, *, first: bool) -> Tensor:
    """Append a frame to the stacks of some environments, and drop the oldest one.

    Args:
        stacks: ``(num_envs, num_frames, *shape)``, the newest frame last.
        rows: ``(n,)`` int64 environments.
        frames: ``(n, *shape)``.
        first: the frames are the first of an episode and fill the stack.
    """
    newest = frames[:, None]
    if first:
        pushed = newest.expand(-1, stacks.shape[1], *frames.shape[1:])
    else:
        pushed = torch.cat([stacks[rows, 1:], newest], 1)
    return stacks.index_copy(0, rows, pushed)
