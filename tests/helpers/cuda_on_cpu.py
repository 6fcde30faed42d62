"""The CUDA kernel compiled for the CPU and called with the same arguments."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from marl_pool.compiled.cuda import call
from marl_pool.compiled.native.call import NetworkSizes

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
"""None where the kernel cannot be compiled."""
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
"""Compiler options that abort the process on invalid memory accesses."""

LAUNCHES = """
extern "C" bool forward(int blocks, int threads, int shared, void **a) {
  return launch(blocks, threads, shared, [&] {
    marl_pool_forward(*(const Real **)a[0], *(Batch *)a[1], *(Real **)a[2]);
  });
}
extern "C" bool backward(int blocks, int threads, int shared, void **a) {
  return launch(blocks, threads, shared, [&] {
    marl_pool_backward(*(const Real **)a[0], *(Batch *)a[1], *(const Real **)a[2],
                       *(Long *)a[3], *(Real **)a[4], *(Real **)a[5]);
  });
}
"""


@functools.cache
def launcher(
    sizes: NetworkSizes,
    name: str,
    threads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[int, int, int, Sequence[Any]], None]:
    """Replace `marl_pool.compiled.cuda.call._launcher`."""
    assert device.type == "cpu"
    entry = getattr(_library(sizes, threads, dtype), name)
    entry.restype = ctypes.c_bool

    def launch(
        blocks: int, threads: int, shared: int, arguments: Sequence[Any]
    ) -> None:
        assert shared <= 8 << 16
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        assert entry(blocks, threads, shared, pointers), "shared memory out of bounds"

    return launch


@functools.cache
def _library(sizes: NetworkSizes, threads: int, dtype: torch.dtype) -> ctypes.CDLL:
    """Compile the network; the folder is deleted once the library is loaded."""
    assert COMPILER is not None
    source = Path(call.__file__).with_name("network.cu").read_text()
    text = f'#include "{HERE}/cuda_on_cpu.hpp"\n{source}\n{LAUNCHES}'
    definitions = [
        f"-D{name}={value}"
        for name, value in call.definitions(sizes, threads, dtype).items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "network.cpp"), Path(folder, "network.so")
        file.write_text(text)
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
        # Such a library needs a process that was started with the sanitizer runtime.
        flags += SANITIZERS if "ASAN_OPTIONS" in os.environ else []
        subprocess.run(
            [COMPILER, *flags, *definitions, str(file), "-o", str(library)], check=True
        )
        return ctypes.CDLL(str(library))
