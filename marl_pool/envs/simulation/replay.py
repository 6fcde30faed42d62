"""Where a world stands whose simulator cannot save games: a seed and what was done."""

from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from marl_pool.envs.base import BatchedEnv


class History:
    """An episode: how it began and what was done; it only ever grows.

    Args:
        seed: of the reset.
        actions: one flat array a step, of all agents in the order of the columns.
    """

    def __init__(self, seed: int, actions: list[np.ndarray] | None = None) -> None:
        self.seed, self.actions = seed, [] if actions is None else actions


class Playing(Protocol):
    """A copy of a simulator, always at the end of its ``history``."""

    history: History | None


class Place(NamedTuple):
    """Where a world stands: after ``length`` actions of a history.

    Worlds that `BatchedEnv.select` gave share copies. The first to step has the copy;
    for another one, a fresh copy is led to where it stands.
    """

    copy: Any
    """Of the simulator, `Playing`."""
    history: History
    length: int

    @property
    def current(self) -> bool:
        """Whether the copy stands here too."""
        copy: Playing = self.copy
        ends = len(self.history.actions) == self.length
        return ends and copy.history is self.history

    def past(self) -> History:
        """The history up to here, as one of its own."""
        return History(self.history.seed, self.history.actions[: self.length])

    def moved(self) -> "Place":
        """The place one step further."""
        return self._replace(length=self.length + 1)


class ReplayedEnv(BatchedEnv):
    """A batch of worlds each of which stands at a `Place`, or has not begun."""

    _places: list[Place | None]

    def select(self, indices: Tensor) -> Self:
        """Return a world of the rows ``indices``; it shares copies until it steps."""
        taken = super().select(indices)
        taken._places = [self._places[row] for row in indices.tolist()]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue: also each episode's seed and actions."""
        pasts = [place and place.past() for place in self._places]
        histories = [past and (past.seed, past.actions) for past in pasts]
        return {**super().state_dict(), "histories": histories}
