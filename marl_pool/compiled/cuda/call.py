"""Calls of the GPU's kernel, with the arguments of ``compiled.native.call``."""

import ctypes
import functools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marl_pool.compiled.cuda.compiler import (
    CompilerError,
    Kernel,
    compile_source,
    most_shared_memory,
    nvrtc,
)
from marl_pool.compiled.native.call import (
    POOLINGS,
    QUERIES,
    NetworkInputs,
    NetworkSizes,
    fields,
    new_result,
    parameter_shapes,
    require,
    require_memory,
    result_shape,
)

WIDEST = 16
"""Wider networks are left to torch: a thread holds a token in its registers."""

MOST_TOKENS = 256
"""Larger sets are left to torch: a block holds whole sets."""

_THREADS = 128
"""Threads of a block whose sets are smaller."""
_BLOCKS = 1056
"""Blocks of a backward pass, eight for each multiprocessor of an H100. A constant, so
that the order of the sums does not depend on the device."""
_POINTER = ctypes.c_void_p


class _Batch(ctypes.Structure):
    """``Batch`` of network.cu."""

    _fields_ = (
        *fields(_POINTER, "values types padding"),
        ("rows", ctypes.c_longlong),
        *fields(ctypes.c_int, "tokens sets"),
        *fields(ctypes.c_double, "scale pooling_scale"),
    )


def can_run(sizes: NetworkSizes, tokens: int, dtype: torch.dtype, device: int) -> bool:
    """Return True if the kernel computes such a network on the device.

    Args:
        sizes: sizes of the network.
        tokens: N, without the extra tokens.
        dtype: float32 or float64.
        device: index of the CUDA device.
    """
    count, heads = tokens + sizes.extra, (sizes.heads, sizes.pooling_heads)
    return (
        torch.version.cuda is not None
        and sizes.dim <= WIDEST
        and not any(sizes.dim % number for number in heads)
        and count <= MOST_TOKENS
        and nvrtc() is not None
        and shared_memory(sizes, _threads(count), dtype) <= most_shared_memory(device)
        and _compiles(sizes, _most_threads(count), dtype, torch.device("cuda", device))
    )


@functools.cache
def _compiles(
    sizes: NetworkSizes, threads: int, dtype: torch.dtype, device: torch.device
) -> bool:
    try:
        # Both kernels are in the module that this compiles.
        _launcher(sizes, "forward", threads, dtype, device)
    except (CompilerError, OSError) as error:
        warnings.warn(
            f"the GPU's kernel was not compiled, so torch computes: {error}",
            stacklevel=2,
        )
        return False
    return True


def run(inputs: NetworkInputs) -> Tensor:
    """Run the network forward; see `marl_pool.compiled.native.call.run`.

    There is no dropout. The result of a set with a type out of range is NaN.
    """
    call, out = _Launch(inputs), new_result(inputs)
    # CUDA refuses to launch no blocks.
    if len(out):
        call.launch("forward", call.groups, [_POINTER(out.data_ptr())])
    return out


def gradients(
    inputs: NetworkInputs, out_gradient: Tensor, *, for_values: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gradients of the values, if requested, and of each parameter.

    The arguments are as in `marl_pool.compiled.native.call.gradients`.
    """
    call, parameters = _Launch(inputs), inputs.parameters
    starts, size = _starts(tuple(map(torch.numel, parameters)))
    blocks = min(call.groups, _BLOCKS)
    partial = call.values.new_zeros((max(blocks, 1), size))
    value_gradient = torch.empty_like(call.values) if for_values else None
    out_gradient = out_gradient.contiguous()
    values = inputs.values
    require_memory(
        out_gradient, "gradient", result_shape(inputs), values.dtype, values.device
    )
    if blocks:
        arguments = [
            _POINTER(out_gradient.data_ptr()),
            ctypes.c_longlong(size),
            _POINTER(partial.data_ptr()),
            _POINTER(_address(value_gradient)),
        ]
        call.launch("backward", blocks, arguments)
    # Atomic additions would need no sum, but their order, and so the result, would
    # change from call to call.
    total = partial.sum(0)
    return value_gradient, [
        total[start : start + parameter.numel()].view_as(parameter)
        for start, parameter in zip(starts, parameters, strict=True)
    ]


@functools.cache
def _starts(counts: tuple[int, ...]) -> tuple[list[int], int]:
    """Return where each parameter begins among all, and the size of all.

    Each begins at a multiple of four numbers, which the kernel reads at once.
    """
    padded = list(map(_padded, counts))
    return [sum(padded[:i]) for i in range(len(padded))], sum(padded)


def _pack(parameters: Sequence[Tensor]) -> Tensor:
    """Copy parameters one after the other, at the places of `_starts`."""
    parts, zeros = [], parameters[0].new_zeros(3)
    for parameter in parameters:
        parts.append(parameter.reshape(-1))
        if gap := -parameter.numel() % 4:
            parts.append(zeros[:gap])
    return torch.cat(parts)


class _Launch:
    """The arguments of one call, checked before their pointers are passed."""

    def __init__(self, inputs: NetworkInputs) -> None:
        sizes, values, types, padding, parameters, *_ = inputs
        rows, tokens, width = values.shape
        require(width == (sizes.features or sizes.dim), "values of the network's width")
        # Keep the copies until the kernel has been launched.
        self.sizes, self.values = sizes, values.contiguous()
        self.types = None if types is None else types.to(torch.int64).contiguous()
        self.padding = None if padding is None else padding.to(torch.bool).contiguous()
        for tensor in (self.types, self.padding):
            if tensor is not None:
                shape, dtype = (rows, tokens), tensor.dtype
                require_memory(tensor, "types and padding", shape, dtype, values.device)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        expected = parameter_shapes(sizes)
        require(shapes == expected, f"weights of shapes {expected}, got {shapes}")
        for parameter in parameters:
            require(parameter.device == values.device, "weights on the values' device")
            require(parameter.dtype == values.dtype, "weights of the values' dtype")
        self.weights = _pack(parameters)
        count = tokens + sizes.extra
        self.threads = _threads(count)
        sets = self.threads // count
        self.groups = math.ceil(rows / sets)
        self.batch = _Batch(
            *(_address(part) for part in (self.values, self.types, self.padding)),
            rows,
            count,
            sets,
            sizes.scale,
            sizes.pooling_scale,
        )

    def launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        weights = _POINTER(self.weights.data_ptr())
        dtype, most = self.values.dtype, _most_threads(self.batch.tokens)
        shared = shared_memory(self.sizes, self.threads, dtype)
        launch = _launcher(self.sizes, name, most, dtype, self.values.device)
        launch(blocks, self.threads, shared, [weights, self.batch, *arguments])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(tokens: int) -> int:
    """Return the threads of a block: of whole sets, in whole warps."""
    return math.ceil(max(_THREADS // tokens, 1) * tokens / 32) * 32


def _most_threads(tokens: int) -> int:
    """Return the most threads of a block, for which the kernel is compiled."""
    return _THREADS if _threads(tokens) <= _THREADS else MOST_TOKENS


def shared_memory(sizes: NetworkSizes, threads: int, dtype: torch.dtype) -> int:
    """Return the bytes of shared memory of a block, as network.cu divides them."""
    width = _padded(sizes.dim)
    rows = (2 * width, 2 * width + _padded(2 * sizes.heads), 3 * width, width)
    # A row is an odd number of quads.
    row = sum(4 * (_padded(part) // 8 * 2 + 1) for part in rows)
    return row * threads * dtype.itemsize + 2 * threads * 4


def _padded(count: int) -> int:
    return math.ceil(count / 4) * 4


def definitions(
    sizes: NetworkSizes, threads: int, dtype: torch.dtype
) -> dict[str, str]:
    """Return the definitions with which network.cu is compiled."""
    macros = vars(sizes) | {"residual": int(sizes.residual)}
    del macros["scale"], macros["pooling_scale"]
    # Only AdaPool has heads and a query.
    if sizes.pooling != POOLINGS["ada"]:
        macros |= {"pooling_heads": 1, "query": QUERIES["mean"]}
    real = "double" if dtype == torch.float64 else "float"
    macros |= {"real": real, "most_threads": threads}
    return {name.upper(): str(value) for name, value in macros.items()}


@functools.cache
def _launcher(
    sizes: NetworkSizes,
    name: str,
    threads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Kernel:
    """Compile the network for a device; both kernels come from one compilation."""
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability()
        code = _machine_code(sizes, threads, dtype, f"sm_{major}{minor}")
        most = most_shared_memory(torch.cuda.current_device())
        return Kernel(code, f"marl_pool_{name}", most)


@functools.cache
def _machine_code(
    sizes: NetworkSizes, threads: int, dtype: torch.dtype, target: str
) -> bytes:
    source = Path(__file__).with_name("network.cu").read_text()
    defined = definitions(sizes, threads, dtype).items()
    flags = [f"-D{name}={value}" for name, value in defined]
    return compile_source(
        source,
        [f"--gpu-architecture={target}", "-std=c++17", "-default-device", "-w", *flags],
    )
