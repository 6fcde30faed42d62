"""Save and branch environments whose simulators cannot save their state.

The state of such an environment is the log of its episode, replayed when needed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.simulation.simulator import ActionLog
from marl_pool.utils.randomness import uniform


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
