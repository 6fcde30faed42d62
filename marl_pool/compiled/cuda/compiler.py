"""Compile CUDA C++ by NVRTC, which comes with torch, and launch it by the driver."""

import ctypes
import functools
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_LARGEST_SHARED = 97
"""``CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN``."""
_ALLOW_SHARED = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``."""


class CompilerError(RuntimeError):
    """NVRTC or the CUDA driver refused a call."""


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC, or return None with a warning where it is missing."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    for file in [*_in_wheels(name), name]:
        try:
            # NVRTC looks for this part by its name alone, and finds one that is loaded.
            if file != name:
                for part in Path(file).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(part))
            return ctypes.CDLL(file)
        except OSError:
            continue
    warnings.warn(
        f"no {name} was found, so torch computes narrow networks on the GPU",
        stacklevel=2,
    )
    return None


def _in_wheels(name: str) -> Iterator[str]:
    """Yield the library's files in NVIDIA's wheels, on which torch depends."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Compile CUDA C++ to machine code.

    Args:
        source: the source.
        options: NVRTC's options, such as ``--gpu-architecture=sm_90``.

    Raises:
        CompilerError: the source has errors; the message is the compiler's.
    """
    library = nvrtc()
    assert library is not None
    program = ctypes.c_void_p()
    text, name = source.encode(), b"marl_pool.cu"
    _call(
        library, "nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None
    )
    try:
        encoded = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        if library.nvrtcCompileProgram(program, len(encoded), array):
            log = _read(library, "ProgramLog", program).rstrip(b"\0")
            raise CompilerError(log.decode(errors="replace"))
        return _read(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(library, f"nvrtcGet{kind}Size", program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    _call(library, f"nvrtcGet{kind}", program, content)
    return content.raw


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise CompilerError(f"{name}: status {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Kernel:
    """A function of a compiled module, on the device that is current.

    Args:
        code: machine code of `compile_source`.
        name: name of the function.
        shared: bytes of dynamic shared memory that its launches may ask for.
    """

    def __init__(self, code: bytes, name: str, shared: int) -> None:
        torch.cuda.current_stream()  # makes the device's context
        self._device = torch.cuda.current_device()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver, function = _driver(), name.encode()
        _call(driver, "cuModuleLoadData", ctypes.byref(self._module), code)
        reference = ctypes.byref(self._function)
        _call(driver, "cuModuleGetFunction", reference, self._module, function)
        _call(driver, "cuFuncSetAttribute", self._function, _ALLOW_SHARED, shared)

    def __call__(
        self, blocks: int, threads: int, shared: int, arguments: Sequence[Any]
    ) -> None:
        """Launch on torch's current stream; arguments are values of ctypes."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            grid = (blocks, 1, 1, threads, 1, 1)
            launch = (shared, stream, pointers, None)
            _call(_driver(), "cuLaunchKernel", self._function, *grid, *launch)


@functools.cache
def most_shared_memory(device: int) -> int:
    """Return the bytes of shared memory that a block of the device may have."""
    value = ctypes.c_int()
    torch.cuda.init()
    reference = ctypes.byref(value)
    _call(_driver(), "cuDeviceGetAttribute", reference, _LARGEST_SHARED, device)
    return value.value
