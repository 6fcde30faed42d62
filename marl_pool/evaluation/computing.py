"""Threads, kernels and time limits of a command's computations."""

from collections.abc import Iterator
from contextlib import contextmanager

from marl_pool.compiled.choice import use_kernels
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.timeout import explain_call_errors, limit_calls
from marl_pool.options.types import Kernels
from marl_pool.utils.devices import torch_threads, without_denormals


@contextmanager
def computing(
    threads: int | None,
    kernels: Kernels = "auto",
    env_timeout: float | None = None,
    device: str = "cpu",
) -> Iterator[None]:
    """Set torch's threads, the kernels and environments' time limit inside the block.

    Denormal numbers are 0 there; see `without_denormals`. Environments reuse the worker
    processes of earlier ones; see `kept_workers`.

    ``threads`` None leaves their number unchanged. See `use_kernels` for ``kernels``
    and ``device``, and `limit_calls` for ``env_timeout``, in seconds.

    Raises:
        InputError: there is no such kernel.
        StoppedError: a call of an environment exceeded the limit, or raised.
    """
    with (
        explain_call_errors(),
        torch_threads(threads),
        use_kernels(kernels, device),
        without_denormals(),
        limit_calls(env_timeout),
        kept_workers(),
    ):
        yield
