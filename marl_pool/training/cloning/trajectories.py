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
NO_ACTION = -1
"""Previous action at the start of an episode, for discrete actions."""


class RowTable:
    """Deduplicating table of byte rows, numbered in the order of arrival.

    Number 0 is the row of zeros. A frame of Pong has about 16 distinct patches out of
    196, most of them already in the table, so it takes a hundredth of its bytes.

    Args:
        width: bytes of a row.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._numbers = {_digest(bytes(width)): 0}
        self._table = np.zeros((1024, width), np.uint8)

    def number(self, rows: Tensor) -> Tensor:
        """Add rows ``(*B, width)`` uint8; return their numbers ``(*B,)`` int32."""
        flat = np.ascontiguousarray(rows.cpu().numpy()).reshape(-1, self.width)
        numbers, known = self._numbers, len(self._numbers)
        keys = map(_digest, flat.view(f"V{self.width}")[:, 0].tolist())
        found = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        # Grow to twice the size needed, so that rows are seldom copied.
        if len(numbers) > len(self._table):
            more = np.zeros((2 * len(numbers), self.width), np.uint8)
            more[:known] = self._table[:known]
            self._table = more
        # Copy the new rows; repeated ones are equal.
        new = found >= known
        self._table[found[new]] = flat[new]
        return torch.from_numpy(found.astype(np.int32)).view(rows.shape[:-1])

    def table(self) -> Tensor:
        """Return a view of the rows by number, ``(rows, width)`` uint8."""
        return torch.from_numpy(self._table[: len(self._numbers)])

    def select(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows among ``numbers``, and their places, int64."""
        used, places = np.unique(numbers.numpy(), return_inverse=True)
        rows = self.table()[torch.from_numpy(used).long()]
        return rows, torch.from_numpy(places).view(numbers.shape)


def _digest(row: bytes) -> bytes:
    """Hash a row to a key of 16 bytes, shorter than most rows."""
    return hashlib.blake2b(row, digest_size=16).digest()


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
    recorded: dict[str, Tensor], env_ids: Tensor, returns: Tensor, rows: RowTable | None
) -> Trajectories:
    """Cut recorded steps into trajectories, one for each life of an agent.

    Args:
        recorded: the `Trajectories.steps`, and ``env``, ``agent``, ``episode``,
            ``time`` and ``begins`` of each, in any order.
        env_ids: ``(E,)``, numbers of the environments, ascending.
        returns: ``(E, A)``, returns of the agents.
        rows: table of distinct features; None unless features are uint8.
    """
    # Sort by environment, agent, episode and time; the last key is the first one.
    keys = [recorded[name] for name in ("time", "episode", "agent", "env")]
    order = torch.from_numpy(np.lexsort(keys))
    recorded = {name: part.index_select(0, order) for name, part in recorded.items()}
    env, agent, time = (recorded[name] for name in ("env", "agent", "time"))
    # A step continues the last one if it is the same agent's next time step.
    starts = torch.ones(len(env), dtype=torch.bool)
    starts[1:] = (env.diff() != 0) | (agent.diff() != 0) | (time.diff() != 1)
    first = starts.nonzero()[:, 0]
    lengths = first.diff(append=torch.tensor([len(env)]))
    steps = {name: recorded[name] for name in STEP_PARTS if name in recorded}
    # Returns are stored by environment and agent: find the row of each trajectory.
    places = torch.searchsorted(env_ids.cpu(), env[first])
    return Trajectories(
        steps,
        _digests(steps, lengths, rows),
        lengths,
        returns.cpu().double()[places, agent[first]],
        env[first],
        recorded["begins"][first],
    )


def _digests(
    steps: dict[str, Tensor], lengths: Tensor, rows: RowTable | None
) -> tuple[str, ...]:
    # Hash the rows: their numbers depend on the order in which rows were recorded.
    features = steps["features"]
    if rows is not None:
        used, places = rows.select(features)
        names = (hashlib.blake2b(row, digest_size=8).digest() for row in used.numpy())
        hashes = np.frombuffer(b"".join(names), dtype=np.int64)
        features = torch.from_numpy(hashes[places.numpy()])
    # Hash observations, previous actions and labels of each trajectory.
    hashed = (features, *(steps[name] for name in ("padding", "prev_action", "label")))
    sizes = lengths.tolist()
    return tuple(
        hashlib.blake2b(
            b"".join(part.numpy().tobytes() for part in parts), digest_size=16
        ).hexdigest()
        for parts in zip(*(part.split(sizes) for part in hashed), strict=True)
    )
