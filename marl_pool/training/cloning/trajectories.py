"""Labelled trajectories: observations, previous actions and the teacher's labels."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

STEP_PARTS = (
    *("features", "types", "padding", "prev_action", "label"),
    *("logits", "privileged_targets"),
)
PER_TRAJECTORY = ("lengths", "returns", "env_ids", "begins")


@dataclass(frozen=True)
class Trajectories:
    """n concatenated trajectories with S steps in all.

    Attributes:
        steps: tensors ``(S, …)`` by name: ``features`` (``(S, N, F)`` float32, or
            ``(S, N)`` int32 numbers in a `RowTable` for uint8 features), ``types``
            uint8, ``padding`` bool, ``prev_action`` (a vector, or the number of the
            choice, -1 at an episode's start), ``label`` (the teacher's action: in
            [-1, 1], or the number of the choice) and optionally the teacher's
            ``logits`` and ``privileged_targets``.
        digests: n digests of observations, previous actions and labels, equal for
            equal trajectories.
        lengths: ``(n,)`` int64, steps of each trajectory.
        returns: ``(n,)`` float64, undiscounted returns of the executed actions.
        env_ids: ``(n,)`` int64, numbers of the environments.
        begins: ``(n,)`` bool, True if the trajectory starts with an agent's first step
            in an episode.
    """

    steps: dict[str, Tensor]
    digests: tuple[str, ...]
    lengths: Tensor
    returns: Tensor
    env_ids: Tensor
    begins: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """Steps of all trajectories, S."""
        return int(self.lengths.sum())

    @property
    def starts(self) -> Tensor:
        """Index of each trajectory's first step, ``(n,)``."""
        return self.lengths.cumsum(0) - self.lengths

    def keep(self, chosen: Tensor) -> "Trajectories":
        """Keep the trajectories of a bool mask ``(n,)``."""
        if chosen.all():
            return self
        rows = chosen.repeat_interleave(self.lengths).nonzero()[:, 0]
        return Trajectories(
            {name: part.index_select(0, rows) for name, part in self.steps.items()},
            tuple(compress(self.digests, chosen.tolist())),
            *(getattr(self, name)[chosen] for name in PER_TRAJECTORY),
        )

    def without_duplicates(self, known: Iterable[str] = ()) -> "Trajectories":
        """Keep the first of equal trajectories, and none whose digest is in `known`."""
        seen = set(known)
        chosen = torch.zeros(len(self), dtype=torch.bool)
        for row, digest in enumerate(self.digests):
            chosen[row] = digest not in seen
            seen.add(digest)
        return self.keep(chosen)


def join(given: Iterable[Trajectories | None]) -> Trajectories:
    """Concatenate trajectories of one teacher."""
    parts = [part for part in given if part is not None]
    return Trajectories(
        {name: torch.cat([p.steps[name] for p in parts]) for name in parts[0].steps},
        tuple(digest for part in parts for digest in part.digests),
        *(torch.cat([getattr(p, name) for p in parts]) for name in PER_TRAJECTORY),
    )


def cut(
    recorded: dict[str, Tensor], env_ids: Tensor, returns: Tensor, table: Tensor | None
) -> Trajectories:
    """Cut recorded steps into trajectories, one for each life of an agent.

    Args:
        recorded: tensors of `StepRecorder.pop`.
        env_ids: ``(E,)``, numbers of the environments, ascending.
        returns: ``(E, A)``, returns of the agents.
        table: distinct features by number; None unless features are uint8.
    """
    env, agent, time = (recorded[name] for name in ("env", "agent", "time"))
    # A step continues the last one if it is the same agent's next time step.
    starts = torch.ones(len(env), dtype=torch.bool)
    starts[1:] = (env.diff() != 0) | (agent.diff() != 0) | (time.diff() != 1)
    first = starts.nonzero()[:, 0]
    lengths = first.diff(append=torch.tensor([len(env)]))
    steps = {name: recorded[name] for name in STEP_PARTS if name in recorded}
    # Returns are stored by environment and agent: find the row of each trajectory.
    rows = torch.searchsorted(env_ids.cpu(), env[first])
    return Trajectories(
        steps,
        _digests(steps, lengths, table),
        lengths,
        returns.cpu().double()[rows, agent[first]],
        env[first],
        recorded["begins"][first],
    )


def _digests(
    steps: dict[str, Tensor], lengths: Tensor, table: Tensor | None
) -> tuple[str, ...]:
    # Hash the rows: their numbers depend on the order in which rows were recorded.
    features = steps["features"]
    if table is not None:
        used, numbers = np.unique(features.numpy(), return_inverse=True)
        rows = table[torch.from_numpy(used).long()].numpy()
        names = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
        hashes = np.frombuffer(names, dtype=np.int64)
        features = torch.from_numpy(hashes[numbers].reshape(features.shape))
    # Hash observations, previous actions and labels of each trajectory.
    hashed = (features, *(steps[name] for name in ("padding", "prev_action", "label")))
    sizes = lengths.tolist()
    return tuple(
        hashlib.blake2b(
            b"".join(part.numpy().tobytes() for part in parts), digest_size=16
        ).hexdigest()
        for parts in zip(*(part.split(sizes) for part in hashed), strict=True)
    )
