"""Trajectories: what was seen, done before and should be done, step after step."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

STEP_PARTS = (
    *("features", "types", "padding", "before", "label"),
    *("logits", "privileged_targets"),
)


@dataclass(frozen=True)
class Trajectories:
    """Some trajectories, one after the other; S steps in all, n trajectories.

    Attributes:
        steps: by name, ``(S, …)``: ``features`` (``(S, N, F)`` float32, or where they
            are bytes ``(S, N)`` int32 numbers of distinct rows), ``types`` uint8,
            ``padding`` bool, ``before`` (the action before as a vector, or the number
            of the choice, -1 for none), ``label`` (what should be done: in [-1, 1],
            or the number of the choice) and perhaps the teacher's ``logits`` and
            ``privileged_targets``.
        lengths: ``(n,)`` int64 steps.
        returns: ``(n,)`` float64 undiscounted, of whoever played.
        worlds: ``(n,)`` int64 numbers of the worlds.
        digests: n digests of what was seen, done and labelled: equal for the same
            trajectory.
    """

    steps: dict[str, Tensor]
    lengths: Tensor
    returns: Tensor
    worlds: Tensor
    digests: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """S."""
        return int(self.lengths.sum())

    @property
    def starts(self) -> Tensor:
        """``(n,)`` the first step of each."""
        return self.lengths.cumsum(0) - self.lengths

    def keep(self, chosen: Tensor) -> "Trajectories":
        """Those of the bool mask ``(n,)``."""
        if chosen.all():
            return self
        rows = chosen.repeat_interleave(self.lengths).nonzero()[:, 0]
        kept = chosen.tolist()
        return Trajectories(
            {name: part.index_select(0, rows) for name, part in self.steps.items()},
            self.lengths[chosen],
            self.returns[chosen],
            self.worlds[chosen],
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
    """Put trajectories of the same kind together."""
    names = set.intersection(*(set(part.steps) for part in parts))
    steps = {
        name: torch.cat([part.steps[name] for part in parts])
        for name in STEP_PARTS
        if name in names
    }
    lengths, returns, worlds = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("lengths", "returns", "worlds")
    )
    digests = tuple(digest for part in parts for digest in part.digests)
    return Trajectories(steps, lengths, returns, worlds, digests)


def cut(
    recorded: dict[str, Tensor],
    returns: dict[tuple[int, int], float],
    table: Tensor | None,
) -> Trajectories:
    """Cut what was recorded into trajectories.

    Args:
        recorded: as `Recorder.pop` returns it; each life of an agent is one of them.
        returns: by world and agent.
        table: the distinct features, where they are bytes.
    """
    env, agent, time = (recorded[name] for name in ("world", "agent", "time"))
    goes_on = (env[1:] == env[:-1]) & (agent[1:] == agent[:-1])
    goes_on &= time[1:] == time[:-1] + 1
    first = torch.cat(
        [torch.zeros(1, dtype=torch.int64), (~goes_on).nonzero()[:, 0] + 1]
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
    # A row's number depends on what was seen before; its own digest does not.
    features = steps["features"]
    if table is not None:
        used, numbers = np.unique(features.numpy(), return_inverse=True)
        names = _row_digests(table[torch.from_numpy(used).long()])
        features = torch.from_numpy(names[numbers].reshape(features.shape))
    sizes = lengths.tolist()
    found = []
    told = (features, *(steps[name] for name in ("padding", "before", "label")))
    for parts in zip(*(part.split(sizes) for part in told), strict=True):
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
