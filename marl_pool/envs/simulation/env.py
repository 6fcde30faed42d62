"""Batched environments around simulators that cannot save their state.

Their state is the log of their episode, which is replayed when needed.
"""

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, Unpack

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, BatchedEnv, EnvOptions
from marl_pool.envs.simulation.simulator import (
    ActionLog,
    SimulatorBackend,
    SimulatorStep,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform
from marl_pool.utils.types import PositiveInt


@dataclass(eq=False)
class PooledSimulator:
    """A simulator of a `SimulatorPool`, in the state at the end of its log."""

    id: int
    log: ActionLog | None = None


class SimulatorPool:
    """Simulators shared by a batch and the batches selected from it."""

    def __init__(self, backend: SimulatorBackend) -> None:
        self.backend = backend
        self._count = 0
        self._free: list[int] = []

    def acquire(self) -> PooledSimulator:
        """Return an unused simulator; it is free again once nothing refers to it."""
        if self._free:
            id_ = self._free.pop()
        else:
            id_, self._count = self._count, self._count + 1
        simulator = PooledSimulator(id_)
        weakref.finalize(simulator, self._free.append, id_).atexit = False
        return simulator


class ReplayCursor(NamedTuple):
    """The state of an environment: after the first ``length`` actions of a log.

    Environments made by `BatchedEnv.select` share simulators. The first one to be
    stepped continues with the simulator; the others replay the episode in another one.
    """

    simulator: Any
    """An object whose ``log`` leads to its state; None before the first episode."""
    """`LoggedSimulator`."""
    log: ActionLog
    length: int

    @property
    def in_sync(self) -> bool:
        """True if the simulator is in this state."""
        return self.simulator.log is self.log and len(self.log.actions) == self.length

    def prefix(self) -> ActionLog:
        """Return a copy of the log up to this state."""
        return ActionLog(self.log.seed, self.log.actions[: self.length])

    def advanced(self) -> "ReplayCursor":
        """Return the cursor one action later."""
        return self._replace(length=self.length + 1)


def reset_seeds(keys: Tensor) -> list[int]:
    """Sample one seed in [0, 2^31) from each reset stream."""
    return (uniform(keys, 1)[:, 0] * (1 << 31)).long().tolist()


class ReplayedEnv(BatchedEnv):
    """A batch of environments whose states are replay cursors.

    Episodes must follow from the seed of their reset and the actions alone.
    """

    simulated = True

    _cursors: list[ReplayCursor | None]
    """One for each environment; None before its first reset."""

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


def saved_logs(state: Mapping[str, Any]) -> dict[int, ActionLog]:
    """Return the logs in a `ReplayedEnv.state_dict`, by row."""
    return {
        row: ActionLog(saved[0], list(saved[1]))
        for row, saved in enumerate(state["action_logs"])
        if saved is not None
    }


class SimulatedEnv(ReplayedEnv):
    """A batch of environments with one simulator each and one group of one agent.

    The seed of an episode comes from the environment's reset stream. Since simulators
    cannot save their state, the environment logs the actions of its episodes. It
    replays them when a state is loaded, and when both an environment and one selected
    from it are stepped: loading a state at step t costs t simulator steps. A terminated
    environment keeps its observation, with reward 0, until the next reset.

    Args:
        simulators: runs the simulators, which are built at their first reset.
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
        num_envs: PositiveInt,
        *,
        simulators: SimulatorBackend,
        shape: tuple[int, ...],
        observation_dtype: torch.dtype,
        max_steps: PositiveInt,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **common)
        self._pool = SimulatorPool(simulators)
        self._cursors: list[ReplayCursor | None] = [None] * num_envs
        self.observations = torch.zeros(
            num_envs, *shape, dtype=observation_dtype, device=self.device
        )
        self.over = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    @abstractmethod
    def _to_native(self, actions: Tensor) -> Tensor:
        """Convert the agents' actions ``(num_envs, A)`` to those of the simulators."""

    def _update_frames(self, rows: Tensor, *, first: bool) -> None:
        """Update frame stacks after new ``observations[rows]``; see `push_frames`."""

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._cursors = [None] * self.num_envs
        # Replay the saved logs, which restores the simulators.
        logs = saved_logs(state)
        if not logs:  # saved before the first reset
            return
        rows = list(logs)
        step = self._replay(rows, self._simulators(rows), list(logs.values()))
        # A replay that ends elsewhere would silently continue another episode.
        if not torch.equal(self._observations_of(step), self.observations[rows]):
            raise InputError(
                f"env {type(self).__name__}: expected the observations of the saved "
                "state after a replay, got others: use the versions of the simulator "
                "that saved it"
            )

    @override
    def _place(self, rows: Tensor, keys: Tensor) -> None:
        if not len(rows):
            return
        numbers, logs = rows.tolist(), [ActionLog(seed) for seed in reset_seeds(keys)]
        step = self._replay(numbers, self._simulators(numbers), logs)
        self.over = self.over.index_fill(0, rows, False)
        self._observe_step(rows, step, first=True)

    @override
    def _advance(self, actions: Mapping[str, Tensor]) -> Advance:
        rewards = torch.zeros(self.num_envs, 1, dtype=self.dtype, device=self.device)
        # Step only the simulators whose episode has not ended.
        rows = (~self.over).nonzero()[:, 0]
        (name,) = self.groups
        if len(rows):
            native = self._to_native(actions[name].detach()[:, 0])
            step = self._step(rows.tolist(), native[rows].cpu().numpy())
            terminated = self._to_device(step.terminated)
            self.over = self.over.index_copy(0, rows, terminated)
            self._observe_step(rows, step, first=False)
            earned = self._to_device(step.rewards).to(self.dtype)
            rewards.index_copy_(0, rows, earned[:, None])
        return {name: rewards}, self.over

    def _step(self, rows: list[int], actions: np.ndarray) -> SimulatorStep:
        # Find a simulator for each row, in the row's state if there is one.
        simulators = self._simulators(rows)
        # Replay the episodes of rows whose simulator was stepped by another batch.
        lost = [
            (row, simulator, cursor.prefix())
            for row, simulator in zip(rows, simulators, strict=True)
            if (cursor := self._cursors[row]) and cursor.simulator is not simulator
        ]
        if lost:
            self._replay(*map(list, zip(*lost, strict=True)))
        # Step all simulators, and log the actions for later replays.
        step = self._pool.backend.step([each.id for each in simulators], actions)
        for row, action in zip(rows, actions, strict=True):
            cursor = self._cursors[row]
            assert cursor is not None, "step before reset"
            cursor.log.actions.append(action)
            self._cursors[row] = cursor.advanced()
        return step

    def _simulators(self, rows: list[int]) -> list[PooledSimulator]:
        """Return each row's simulator if it is in the row's state, else another."""
        simulators: list[PooledSimulator] = []
        for row in rows:
            cursor = self._cursors[row]
            own = cursor.simulator if cursor and cursor.in_sync else None
            # Rows that were selected twice share a simulator until they step.
            if own is None or own in simulators:
                own = self._pool.acquire()
            simulators.append(own)
        return simulators

    def _replay(
        self, rows: list[int], simulators: list[PooledSimulator], logs: list[ActionLog]
    ) -> SimulatorStep:
        """Bring the simulators of ``rows`` to the ends of the logs."""
        step = self._pool.backend.replay([each.id for each in simulators], logs)
        for row, simulator, log in zip(rows, simulators, logs, strict=True):
            simulator.log = log
            self._cursors[row] = ReplayCursor(simulator, log, len(log.actions))
        return step

    def _observe_step(self, rows: Tensor, step: SimulatorStep, *, first: bool) -> None:
        # Replace tensors instead of writing into what a caller may keep.
        newest = self._observations_of(step)
        self.observations = self.observations.index_copy(0, rows, newest)
        self._update_frames(rows, first=first)

    def _observations_of(self, step: SimulatorStep) -> Tensor:
        return self._to_device(step.observations).to(self.observations.dtype)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


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
