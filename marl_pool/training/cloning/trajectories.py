"""Labelled trajectories: observations, previous actions and the teacher's labels."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

STEP_PARTS = (
    *("features", "types", "padding", "prev_action", "label"),
    *("logits", "privileged_targets"),
)


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
        lengths: ``(n,)`` int64, steps of each trajectory.
        returns: ``(n,)`` float64, undiscounted returns of the executed actions.
        env_ids: ``(n,)`` int64, numbers of the environments.
        digests: n digests of observations, previous actions and labels, equal for
            equal trajectories.
    """

    steps: dict[str, Tensor]
    lengths: Tensor
    returns: Tensor
    env_ids: Tensor
    digests: tuple[str, ...]

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
        kept = chosen.tolist()
        return Trajectories(
            {name: part.index_select(0, rows) for name, part in self.steps.items()},
            self.lengths[chosen],
            self.returns[chosen],
            self.env_ids[chosen],
            tuple(d for d, keep in zip(self.digests, kept, strict=True) if keep),
        )

    def without_duplicates(self, known: Sequence[str] = ()) -> "Trajectories":
        """Keep the first of equal trajectories, and none whose digest is in `known`."""
        seen = set(known)
        chosen = []
        for digest in self.digests:
            chosen.append(digest not in seen)
            seen.add(digest)
        return self.keep(torch.tensor(chosen, dtype=torch.bool))


def join(parts: Sequence[Trajectories]) -> Trajectories:
    """Concatenate trajectories; parts of a step that some lack are dropped."""
    names = set.intersection(*(set(part.steps) for part in parts))
    steps = {
        name: torch.cat([part.steps[name] for part in parts])
        for name in STEP_PARTS
        if name in names
    }
    lengths, returns, env_ids = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("lengths", "returns", "env_ids")
    )
    digests = tuple(digest for part in parts for digest in part.digests)
    return Trajectories(steps, lengths, returns, env_ids, digests)


def cut(
    recorded: dict[str, Tensor],
    returns: dict[tuple[int, int], float],
    table: Tensor | None,
) -> Trajectories:
    """Cut recorded steps into trajectories, one for each life of an agent.

    Args:
        recorded: tensors of `StepRecorder.pop`.
        returns: returns by environment number and agent.
        table: distinct features by number; None unless features are uint8.
    """
    env, agent, time = (recorded[name] for name in ("env", "agent", "time"))
    # A step continues the last one if it is the same agent's next time step.
    continues = (env[1:] == env[:-1]) & (agent[1:] == agent[:-1])
    continues &= time[1:] == time[:-1] + 1
    first = torch.cat(
        [torch.zeros(1, dtype=torch.int64), (~continues).nonzero()[:, 0] + 1]
    )
    ends = torch.cat([first[1:], torch.tensor([len(env)])])
    lengths = ends - first
    steps = {name: recorded[name] for name in STEP_PARTS if name in recorded}
    pairs = zip(env[first].tolist(), agent[first].tolist(), strict=True)
    return Trajectories(
        steps,
        lengths,
        torch.tensor([returns[pair] for pair in pairs], dtype=torch.float64),
        env[first],
        _digests(steps, lengths, table),
    )


def _digests(
    steps: dict[str, Tensor], lengths: Tensor, table: Tensor | None
) -> tuple[str, ...]:
    # Hash the rows: their numbers depend on the order in which rows were recorded.
    features = steps["features"]
    if table is not None:
        used, numbers = np.unique(features.numpy(), return_inverse=True)
        names = _row_digests(table[torch.from_numpy(used).long()])
        features = torch.from_numpy(names[numbers].reshape(features.shape))
    sizes = lengths.tolist()
    found = []
    hashed = (features, *(steps[name] for name in ("padding", "prev_action", "label")))
    for parts in zip(*(part.split(sizes) for part in hashed), strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part.numpy().tobytes())
        found.append(digest.hexdigest())
    return tuple(found)


def _row_digests(table: Tensor) -> np.ndarray:
    joined = b"".join(
        hashlib.blake2b(row, digest_size=8).digest() for row in table.numpy()
    )
    return np.frombuffer(joined, dtype=np.int64)
