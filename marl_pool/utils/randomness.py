"""Counter-based random streams: one for each (seed, environment, episode, purpose).

A number depends only on the key of its stream and its position there. Hence one seed
fixes everything, an environment gives the same episode alone and among thousands, and a
clean and a perturbed episode can share their dynamics. The bits come from two rounds of
the finaliser of SplitMix64 (Steele, Lea and Flood, 2014,
https://doi.org/10.1145/2660193.2660195), written in torch so that whole blocks are
sampled at once on any device.

Training's environments are numbered from 0 over all runners, evaluation's from
`EVALUATION_ENVS`. A restarted runner continues at a later episode number.
"""

import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_pool.utils.devices import may_read
from marl_pool.utils.errors import InputError


def process_seed(seed: int, number: int = 0) -> int:
    """Return the seed of a learner or, by its number, of a runner, for `seed_process`.

    Any integer is a seed of a run.
    """
    return zlib.crc32(str(seed).encode()) % (1 << 31) + number


def seed_torch(seed: int, device_type: str) -> None:
    """Seed torch's generators of the CPU and of one more type of device.

    `torch.manual_seed` seeds every type, and stores a traceback for each that has not
    been used, which takes milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device_type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_process(seed: int) -> None:
    """Seed a process's generators, and make torch reproducible bit for bit.

    Our own numbers come from streams; an environment may use Python's or numpy's.

    Args:
        seed: from 0 to 2³² - 1.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    seed_torch(seed, "cpu")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if torch.version.cuda is None:
        # `torch.use_deterministic_algorithms` does this, and first imports inductor and
        # sympy for 1.5 s.
        torch._C._set_deterministic_algorithms(True, warn_only=False)
    else:
        # See https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.manual_seed_all(seed)


@contextmanager
def restored_randomness() -> Iterator[None]:
    """Restore at the end what `seed_process` sets: generators, deterministic modes."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    cudnn = torch.backends.cudnn
    cudnn_modes = cudnn.deterministic, cudnn.benchmark
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Without a GPU in use, its generators have no state to restore.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    try:
        with torch.random.fork_rng(range(num_gpus)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        cudnn.deterministic, cudnn.benchmark = cudnn_modes
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


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


def place_in_batch(env_id: int) -> int:
    """Return the number of an environment as users count it, from 0."""
    return env_id % VALIDATION_ENVS


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    # In place: fresh memory for each step would cost as much again.
    # int64 wraps like uint64; the masks make its arithmetic shifts logical.
    bits ^= (bits >> 30).bitwise_and_((1 << 34) - 1)
    bits *= _MIX_1
    bits ^= (bits >> 27).bitwise_and_((1 << 37) - 1)
    bits *= _MIX_2
    bits ^= (bits >> 31).bitwise_and_((1 << 33) - 1)
    return bits


def stream_keys(
    seed: int, env_ids: Tensor, episodes: Tensor, purpose: Purpose, part: int = 0
) -> Tensor:
    """Hash the parts of a stream's name into its key.

    Args:
        seed: integer in [0, 2**63).
        env_ids: ``(n,)`` int64 environment numbers.
        episodes: ``(n,)`` int64 episode numbers.
        purpose: use of the numbers.
        part: distinguishes streams of one purpose, such as one for each group.

    Returns:
        ``(n,)`` int64 keys.
    """
    key = _mix(torch.full_like(env_ids, seed) + _GAMMA)
    kind = torch.full_like(env_ids, int(purpose) + (part << 8))
    for name in (env_ids, episodes, kind):
        key = _mix(key ^ (name * _GAMMA + _MIX_2))
    return key


def uniform(keys: Tensor, count: int, start: int | Tensor = 0) -> Tensor:
    """Sample ``count`` numbers of each stream.

    Args:
        keys: ``(n,)`` from `stream_keys`.
        count: numbers of each stream.
        start: position of the first number in the stream, an integer or ``(n, 1)``.

    Returns:
        ``(n, count)`` float64 in the open interval (0, 1).
    """
    places = torch.arange(count, device=keys.device) + start
    key = keys[:, None]
    # Mix the key in twice: keys that differ by a multiple of `_GAMMA` would otherwise
    # have shifted copies of one stream.
    bits = _mix(_mix(key + (places + 1) * _GAMMA) ^ key)
    # 52 bits and a half: with 53 the largest sum would round to 1.
    bits = (bits >> 12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


def below_one(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers in (0, 1) to ``dtype``, in which they may round up to 1."""
    return numbers.to(dtype).clamp(max=1 - torch.finfo(dtype).eps)


@dataclass(eq=False, repr=False)
class Stream:
    """Uniform numbers for one purpose, ``size`` per step for each environment.

    On a CPU, hashing step by step would cost more than the environments themselves, so
    a block of steps is sampled ahead; the numbers do not depend on its length. On a GPU
    every step is hashed, since replacing the blocks of restarted episodes would require
    their indices on the host.

    Args:
        seed: integer in [0, 2**63).
        env_ids: ``(num_envs,)`` int64 environment numbers.
        purpose: use of the numbers.
        size: numbers per step for each environment.
        part: distinguishes streams of one purpose.
        dtype: dtype of the numbers.
        block: steps sampled ahead.
    """

    seed: int
    env_ids: Tensor
    purpose: Purpose
    size: int
    _: KW_ONLY
    part: int = 0
    dtype: torch.dtype = torch.float32
    block: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise InputError(
                f"seed: expected an integer in [0, 2**63), got {self.seed}"
            )
        self.keys = self._keys(torch.zeros_like(self.env_ids))
        # Steps of the episode at the start of the block.
        self.steps = torch.zeros_like(self.env_ids)
        self._buffer: Tensor | None = None
        self._next = 0

    def restart(self, episodes: Tensor, where: Tensor | None = None) -> None:
        """Begin new episodes.

        Args:
            episodes: ``(num_envs,)`` episode number of every environment.
            where: ``(num_envs,)`` bool, environments whose episode starts, or None for
                all.
        """
        if self.size == 0:
            return  # without numbers, no keys are needed
        # Without `where`, the next block is sampled from scratch.
        keys = self._keys(episodes)
        if where is None:
            self.keys, self.steps = keys, torch.zeros_like(self.steps)
            self._buffer, self._next = None, 0
            return
        self.keys = torch.where(where, keys, self.keys)
        if not may_read(where):
            # Drop the block, instead of replacing the rest of it where episodes start.
            self.steps = (self.steps + self._next).masked_fill(where, 0)
            self._buffer, self._next = None, 0
            return
        # A restarted environment's step 0 is served next, so its block began earlier.
        self.steps = torch.where(where, -self._next, self.steps)
        # Replace the rest of the block of the restarted environments.
        if self._buffer is not None and self._next < self._buffer.shape[0]:
            rows = where.nonzero()[:, 0]
            self._buffer[:, rows] = self._sample(rows, self._buffer.shape[0])

    def next(self) -> Tensor:
        """Return the next step's numbers, ``(num_envs, size)`` in (0, 1)."""
        if self._buffer is None or self._next == self._buffer.shape[0]:
            # `_next` is 0 without a buffer.
            self.steps = self.steps + self._next
            block = self.block if may_read(self.keys) else 1
            self._buffer, self._next = self._sample(slice(None), block), 0
        self._next += 1
        return self._buffer[self._next - 1]

    def select(self, indices: Tensor) -> "Stream":
        """Return the streams of the environments at ``indices``, where they are now."""
        selected = replace(self, env_ids=self.env_ids[indices])
        selected.keys = self.keys[indices]
        selected.steps = self.steps[indices] + self._next
        return selected

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in the streams, from which they continue exactly."""
        return {"keys": self.keys.clone(), "steps": self.steps + self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.keys = state["keys"].to(self.env_ids.device)
        self.steps = state["steps"].to(self.env_ids.device)
        self._buffer, self._next = None, 0

    def _keys(self, episodes: Tensor) -> Tensor:
        return stream_keys(self.seed, self.env_ids, episodes, self.purpose, self.part)

    # Later steps of a block sampled in inference mode may be part of a gradient.
    @torch.inference_mode(False)
    def _sample(self, rows: Tensor | slice, block: int) -> Tensor:
        keys, first = self.keys[rows], self.steps[rows]
        flat = uniform(keys, block * self.size, first[:, None] * self.size)
        flat = below_one(flat, self.dtype)
        return flat.view(len(keys), block, self.size).transpose(0, 1).contiguous()
