"""Worlds around simulators that step one at a time and cannot save their state."""

import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import EnvOptions
from marl_pool.envs.simulation.replay import History, Place, ReplayedEnv
from marl_pool.envs.simulation.simulator import Played
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform
from marl_pool.utils.types import PositiveInt

SEEDS = 1 << 31
"""A simulator's episodes are seeded below it."""


class Batch(Protocol):
    """`Simulators` here or in another process."""

    def begin(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        pasts: Sequence[Sequence[np.ndarray]],
    ) -> Played:
        """Begin episodes anew and repeat what was done in them."""

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> Played:
        """Step the copies ``numbers``."""


class Copy:
    """A simulator by its number, always at the end of its ``history``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.history: History | None = None


class Pool:
    """Simulators that worlds share.

    Args:
        simulators: by number.
    """

    def __init__(self, simulators: Batch) -> None:
        self.simulators = simulators
        self._count = 0
        self._free: list[int] = []

    def copy(self) -> Copy:
        """A simulator that no world holds: one left behind, or a further one."""
        if self._free:
            number = self._free.pop()
        else:
            number, self._count = self._count, self._count + 1
        copy = Copy(number)
        weakref.finalize(copy, self._free.append, number).atexit = False
        return copy


class SimulatedEnv(ReplayedEnv):
    """A simulator for each world, and what all of them showed last.

    An episode is seeded from the world's reset stream and must follow from that seed
    and the actions. Each world keeps its episode's actions. Where it stands, its
    simulator is led by repeating them: when a state is loaded, or when a world made
    by `select` and the one that it was taken from both go on. A world whose episode has
    ended stands still, with reward 0, until it is reset.

    Args:
        num_envs: worlds in the batch.
        simulators: by number; they need not exist before they begin.
        shape: of an observation.
        observed: dtype of the observations.
        **context: as `BatchedEnv` takes it.
    """

    simulated = True

    observations: Tensor
    """``(num_envs, *shape)``, what the simulators showed last."""
    over: Tensor
    """``(num_envs,)`` bool: the episode has ended."""

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        simulators: Batch,
        shape: tuple[int, ...],
        observed: torch.dtype,
        max_steps: PositiveInt,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(
            num_envs,
            max_steps=max_steps,
            **common,
        )
        self._pool = Pool(simulators)
        self._places: list[Place | None] = [None] * num_envs
        empty = torch.zeros(num_envs, *shape, dtype=observed, device=self.device)
        self.observations = empty
        self.over = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    @abstractmethod
    def _native(self, actions: Tensor) -> Tensor:
        """The simulators' actions, from the one group's ``(num_envs, A)``."""

    def _shown(self, rows: Tensor, fresh: bool) -> None:
        """Hear that the observations of ``rows`` are new; ``fresh`` after a reset."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, by repeating its actions.

        Raises:
            InputError: that leads elsewhere, under another version, say.
        """
        super().load_state_dict(state)
        pasts = {row: past for row, past in enumerate(state["histories"]) if past}
        histories = [History(seed, list(done)) for seed, done in pasts.values()]
        self._places = [None] * self.num_envs
        if not pasts:
            return
        rows = list(pasts)
        played = self._begin(rows, self._copies(rows), histories)
        if not torch.equal(self._tensor(played), self.observations[rows]):
            raise InputError(
                f"env {type(self).__name__}: the saved episodes take another course "
                "here: expected the versions of the simulator that played them"
            )

    def _place(self, rows: Tensor, keys: Tensor) -> None:
        if not len(rows):
            return
        seeds = (uniform(keys, 1)[:, 0] * SEEDS).long().tolist()
        chosen = rows.tolist()
        histories = [History(seed) for seed in seeds]
        played = self._begin(chosen, self._copies(chosen), histories)
        self.over = self.over.index_fill(0, rows, False)
        self._show(rows, played, fresh=True)

    def _advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        rewards = torch.zeros(self.num_envs, 1, dtype=self.dtype, device=self.device)
        rows = (~self.over).nonzero()[:, 0]
        (name,) = self.groups
        if len(rows):
            native = self._native(actions[name].detach()[:, 0])
            played = self._play(rows.tolist(), native[rows].cpu().numpy())
            self.over = self.over.index_copy(0, rows, self._to_device(played.over))
            self._show(rows, played, fresh=False)
            earned = self._to_device(played.rewards).to(self.dtype)
            rewards.index_copy_(0, rows, earned[:, None])
        return {name: rewards}, self.over

    def _play(self, rows: list[int], actions: np.ndarray) -> Played:
        """Step the worlds ``rows``, each by a copy that stands where it does."""
        copies = self._copies(rows)
        places = [self._places[row] for row in rows]
        lost = [
            (row, copy, place.past())
            for row, copy, place in zip(rows, copies, places, strict=True)
            if place is not None and place.copy is not copy
        ]
        if lost:
            self._begin(*map(list, zip(*lost, strict=True)))
        played = self._pool.simulators.step([copy.number for copy in copies], actions)
        for row, action in zip(rows, actions, strict=True):
            place = self._places[row]
            assert place is not None, "step before reset"
            place.history.actions.append(action)
            self._places[row] = place.moved()
        return played

    def _copies(self, rows: list[int]) -> list[Copy]:
        """For each row its own copy if that stands where it does, else a fresh one."""
        copies: list[Copy] = []
        for row in rows:
            place = self._places[row]
            own = None if place is None or not place.current else place.copy
            # Rows that were taken twice share a copy until they step.
            copies.append(own if own and own not in copies else self._pool.copy())
        return copies

    def _begin(
        self, rows: list[int], copies: list[Copy], histories: list[History]
    ) -> Played:
        """Lead copies to the ends of histories, as those of the worlds ``rows``."""
        numbers = [copy.number for copy in copies]
        seeds = [history.seed for history in histories]
        pasts = [history.actions for history in histories]
        played = self._pool.simulators.begin(numbers, seeds, pasts)
        for row, copy, history in zip(rows, copies, histories, strict=True):
            copy.history = history
            self._places[row] = Place(copy, history, len(history.actions))
        return played

    def _show(self, rows: Tensor, played: Played, fresh: bool) -> None:
        seen = self._tensor(played)
        self.observations = self.observations.index_copy(0, rows, seen)
        self._shown(rows, fresh)

    def _tensor(self, played: Played) -> Tensor:
        return self._to_device(played.observations).to(self.observations.dtype)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _tensors(self) -> dict[str, Tensor]:
        return {"observations": self.observations, "over": self.over}
