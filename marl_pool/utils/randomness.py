"""Counter-based random streams: one for each (seed, world, episode, purpose).

A number of a stream depends on its key and its place in the stream alone. Hence one
seed fixes everything, a world gives the same episode alone and among thousands, and
a clean and a perturbed episode can share their dynamics. The bits come from two
rounds of the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), written in torch
so that whole blocks are drawn at once on any device.
"""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from marl_pool.utils.errors import InputError


class Purpose(IntEnum):
    """Use of a random stream."""

    RESET = 1
    DYNAMICS = 2
    POLICY = 3
    PERTURBATION = 4
    SEARCH = 5
    LEARNING = 6


VALIDATION_ENVS = 1 << 40
"""First environment number of validation, by which a solution is chosen."""
EVALUATION_ENVS = 1 << 41
"""First environment number of evaluation, whose returns are reported."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    # Writes into its argument: fresh memory for each step would cost as much again.
    # int64 wraps like uint64; the masks make its arithmetic shifts logical.
    bits ^= (bits >> 30).bitwise_and_((1 << 34) - 1)
    bits *= _MIX_1
    bits ^= (bits >> 27).bitwise_and_((1 << 37) - 1)
    bits *= _MIX_2
    bits ^= (bits >> 31).bitwise_and_((1 << 33) - 1)
    return bits


def stream_keys(
    seed: int, worlds: Tensor, episodes: Tensor, purpose: Purpose, part: int = 0
) -> Tensor:
    """Hash the parts of a stream's name into its key.

    Args:
        seed: any integer of at most 63 bits, not negative.
        worlds: ``(n,)`` int64 world numbers.
        episodes: ``(n,)`` int64 episode numbers.
        purpose: what the numbers are for.
        part: tells streams of one purpose apart (the groups of agents, say).

    Returns:
        ``(n,)`` int64 keys.
    """
    key = _mix(torch.full_like(worlds, seed) + _GAMMA)
    kind = torch.full_like(worlds, int(purpose) + (part << 8))
    for name in (worlds, episodes, kind):
        key = _mix(key ^ (name * _GAMMA + _MIX_2))
    return key


def uniform(keys: Tensor, count: int, start: int | Tensor = 0) -> Tensor:
    """Draw ``count`` numbers of each stream.

    Args:
        keys: ``(n,)`` from `stream_keys`.
        count: how many of each stream.
        start: place of the first number in the stream, an integer or ``(n, 1)``.

    Returns:
        ``(n, count)`` float64 in the open interval (0, 1).
    """
    places = torch.arange(count, device=keys.device) + start
    key = keys[:, None]
    bits = _mix(_mix(key + (places + 1) * _GAMMA) ^ key)
    # 52 bits and a half: with 53 the largest sum would round to 1.
    bits = (bits >> 12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


class Stream:
    """Uniform numbers for one purpose, ``size`` of them a step for each world.

    Hashing step by step would cost more than the worlds themselves, so a block of
    steps is drawn ahead; what comes out does not depend on the block's length.

    Args:
        seed: the run's seed.
        worlds: ``(num_envs,)`` int64 world numbers.
        purpose: what the numbers decide.
        size: numbers a step for each world.
        part: tells streams of one purpose apart.
        dtype: of the numbers.
        block: steps drawn ahead.
    """

    def __init__(
        self,
        seed: int,
        worlds: Tensor,
        purpose: Purpose,
        size: int,
        *,
        part: int = 0,
        dtype: torch.dtype = torch.float32,
        block: int = 64,
    ) -> None:
        if not 0 <= seed < 1 << 63:
            raise InputError(f"seed: expected an integer in [0, 2**63), got {seed}")
        self.seed, self.purpose, self.size, self.part = seed, purpose, size, part
        self.dtype, self.block = dtype, block
        self.worlds = worlds
        self.keys = self._keys(torch.zeros_like(worlds))
        self.steps = torch.zeros_like(worlds)  # of the episode, at the block's start
        self._buffer: Tensor | None = None
        self._next = 0

    def restart(self, episodes: Tensor, where: Tensor | None = None) -> None:
        """Begin new episodes, numbered by ``episodes`` ``(num_envs,)``.

        Args:
            episodes: the episode number of every world.
            where: ``(num_envs,)`` bool, environments whose episode starts; None: all.
        """
        if self.size == 0:
            return  # no numbers, no need of keys
        keys = self._keys(episodes)
        if where is None:
            self.keys, self.steps = keys, torch.zeros_like(self.steps)
            self._buffer, self._next = None, 0
            return
        self.keys = torch.where(where, keys, self.keys)
        # A restarted world's step 0 is served next, so its block began earlier.
        self.steps = torch.where(where, -self._next, self.steps)
        if self._buffer is not None and self._next < self._buffer.shape[0]:
            rows = where.nonzero()[:, 0]
            self._buffer[:, rows] = self._draw(rows)

    def next(self) -> Tensor:
        """Return the next step's numbers, ``(num_envs, size)`` in (0, 1)."""
        if self._buffer is None:
            self._buffer, self._next = self._draw(slice(None)), 0
        elif self._next == self._buffer.shape[0]:
            self.steps = self.steps + self._next
            self._buffer, self._next = self._draw(slice(None)), 0
        self._next += 1
        return self._buffer[self._next - 1]

    def select(self, indices: Tensor) -> "Stream":
        """Return the streams of the worlds at ``indices``, where they stand now."""
        taken = Stream(
            self.seed,
            self.worlds[indices],
            self.purpose,
            self.size,
            part=self.part,
            dtype=self.dtype,
            block=self.block,
        )
        taken.keys = self.keys[indices]
        taken.steps = self.steps[indices] + self._next
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The streams' places, enough to continue exactly."""
        return {"keys": self.keys.clone(), "steps": self.steps + self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self.keys = state["keys"].to(self.worlds.device)
        self.steps = state["steps"].to(self.worlds.device)
        self._buffer, self._next = None, 0

    def _keys(self, episodes: Tensor) -> Tensor:
        return stream_keys(self.seed, self.worlds, episodes, self.purpose, self.part)

    def _draw(self, rows: Tensor | slice) -> Tensor:
        keys, first = self.keys[rows], self.steps[rows]
        drawn = uniform(keys, self.block * self.size, first[:, None] * self.size)
        # A float32 rounds the largest float64 below 1 up to 1; keep it below.
        drawn = drawn.to(self.dtype).clamp(max=1 - torch.finfo(self.dtype).eps)
        return drawn.view(len(keys), self.block, self.size).transpose(0, 1).contiguous()
