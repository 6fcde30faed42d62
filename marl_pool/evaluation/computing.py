"""Threads, kernels and time limits of a command's computations."""

from collections.abc import Iterator
from contextlib import contextmanager

from marl_pool.compiled.choice import use_kernels
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.timeout import EnvTimeoutError, limit_calls, raised_by
from marl_pool.options.types import Kernels
from marl_pool.utils.devices import torch_threads, without_denormals
from marl_pool.utils.errors import InputError, StoppedError, described


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
    try:
        with (
            torch_threads(threads),
            use_kernels(kernels, device),
            without_denormals(),
            limit_calls(env_timeout),
            kept_workers(),
        ):
            yield
    except EnvTimeoutError as error:
        raise StoppedError(str(error)) from error
    except InputError:
        raise
    except Exception as error:
        # Environments are the user's code; any other failure is our own bug.
        if not (call := raised_by(error)):
            raise
        raise StoppedError(f"{described(error)}, raised by {call}") from error
