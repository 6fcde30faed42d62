"""The choice between the compiled kernel and torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast, get_args

from marl_pool.compiled.native.call import library
from marl_pool.options.types import Kernels
from marl_pool.utils.errors import InputError

KERNELS_VARIABLE = "MARL_POOL_KERNELS"
"""Environment variable with the choice, so that worker processes inherit it."""

_CHOICES = get_args(Kernels)


def chosen_kernels() -> Kernels:
    """Return the choice of this process, "auto" by default.

    Raises:
        InputError: the environment variable is none of the choices.
    """
    choice = os.environ.get(KERNELS_VARIABLE, "auto")
    if choice not in _CHOICES:
        raise InputError(
            f"{KERNELS_VARIABLE}: expected auto, torch or native, got {choice!r}"
        )
    return cast(Kernels, choice)


@contextmanager
def use_kernels(choice: Kernels, device: str = "cpu") -> Iterator[None]:
    """Choose kernels within the context, and for processes started in it.

    Args:
        choice: "torch"; "native", which is an error without a compiled kernel; "auto"
            leaves the choice as it is, by default the kernel where it fits.
        device: the device that computes.

    Raises:
        InputError: "native" without a compiled kernel for the device, or the
            environment variable is none of the choices.
    """
    if choice == "native" and not has_kernel(device):
        missing = (
            "was compiled for this machine; install g++ or clang, then marl-pool again"
            if device == "cpu"
            else "can be compiled for a GPU, since NVRTC is missing"
        )
        raise InputError(
            f"kernels: expected auto or torch, got native, but no kernel {missing}"
        )
    chosen_kernels()  # a variable that is wrong is an error here, too
    if choice == "auto":
        yield
        return
    before = os.environ.get(KERNELS_VARIABLE)
    os.environ[KERNELS_VARIABLE] = choice
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(KERNELS_VARIABLE, None)
        else:
            os.environ[KERNELS_VARIABLE] = before


def has_kernel(device: str) -> bool:
    """Return True if there is a compiled kernel for a device, or a compiler for one."""
    if device == "cpu":
        return library() is not None
    from marl_pool.compiled.cuda.compiler import nvrtc

    return nvrtc() is not None


def describe_kernels(device: str = "cpu") -> str:
    """Describe in a few words what computes narrow networks on a device, for logs."""
    if chosen_kernels() == "torch":
        return "torch"
    if device != "cpu":
        return "cuda" if has_kernel(device) else "torch (no kernel can be compiled)"
    kernel = library()
    if kernel is None:
        return "torch (no kernel was compiled)"
    return f"native ({kernel._name.rpartition('kernel-')[2].removesuffix('.so')})"
