"""Missing GPUs, transfers that stall one, and threads and denormal numbers of CPUs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from marl_pool.utils.errors import InputError

_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


def checked_device(device: str | torch.device, key: str = "device") -> torch.device:
    """Return a device; raise `InputError` for one that torch does not find."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    # The meta device, without numbers, serves to compute shapes.
    if place is None or place.type not in ("cpu", "cuda", "meta"):
        raise InputError(f"{key}: expected cpu, cuda or cuda:N, got {device!r}")
    count = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= count:
        places = f"one of {count} CUDA devices"
        places = places if count else "cpu, since torch finds no CUDA device"
        raise InputError(f"{key}: expected {places}, got {device}")
    return place


def may_read(tensor: Tensor) -> bool:
    """Return True if reading values of the tensor does not stall a device.

    On a GPU operations are queued. ``.item()``, ``bool(…)``, ``nonzero()`` and an index
    by a mask wait until the queue is empty, and the GPU is idle until it is filled
    again. So code that can save work by reading values asks first; where it may not
    read, it computes all rows, and selects by masks.
    """
    return tensor.is_cpu and not _forbidden.get()


@contextmanager
def without_reads() -> Iterator[None]:
    """Make `may_read` return False on a CPU too, as on a GPU."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with ``count`` threads; None leaves the number as it is."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Round numbers nearer to 0 than the smallest normal one (1.2e-38 in float32) to 0.

    A processor takes many times as long for them as for others, and the softmax of a
    wide network with large weights is full of them: forward and backward passes take
    1.6 times as long (``denormals/width_128`` in docs/benchmarks.md).

    It holds for torch, the compiled kernel, numpy and Python, in this thread and in
    those that it starts inside the block. A thread of torch's pool keeps the mode in
    which it was started. On a processor without such a mode nothing happens. It also
    decorates functions.
    """
    before = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def constant(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a tensor of numbers or bools that is copied to the device only once.

    It is shared, so do not write into it.
    """
    # A tensor that torch.export traces has no numbers for later calls.
    if torch.compiler.is_compiling():
        return torch.tensor(values, device=device, dtype=dtype)
    return _constant(values, device, dtype)


@lru_cache(maxsize=256)
def _constant(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    # Without the dtype, (1,) and (True,) would be the same constant. No gradient could
    # contain a tensor that was made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)
