"""Calls of the compiled kernel: a whole set transformer, forward or with gradients.

The kernel's lanes are rows of the batch: as many sets as a register has numbers, 16 of
float32 with AVX-512, go through embedding, layers and pooling while they stay in the
cache. The forward pass is computed again for the gradient. Start reading in
``src/network.hpp``.
"""

import ctypes
import functools
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.kernels.functional import require

_UNKNOWN_TYPE, _NO_MEMORY = 1, 2  # Status of kernel.hpp
_threads = ContextVar[int | None]("threads", default=None)


@contextmanager
def threads_for_kernel() -> Iterator[None]:
    """Leave torch's threads to the kernel; torch itself computes with one.

    Torch's threads synchronize at every small operation. Where another process uses a
    core they cost several times what they gain; the kernel's meet once a call.
    """
    threads = torch.get_num_threads()
    token = _threads.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _threads.reset(token)


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of one type for a `ctypes.Structure`, given their names."""
    return [(name, kind) for name in names.split()]


class _Sizes(ctypes.Structure):
    """``Sizes`` of network.hpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *fields(ctypes.c_int32, "tokens features types type_width input_activation"),
        *fields(ctypes.c_int32, "extra dim layers heads dim_ff activation"),
        *fields(ctypes.c_int32, "pooling pooling_heads query residual"),
        *fields(ctypes.c_double, "scale pooling_scale dropout"),
        ("seed", ctypes.c_uint64),
    )


class MlpSizes(ctypes.Structure):
    """``MlpSizes`` of mlp.hpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *fields(ctypes.c_int32, "layers activation"),
        ("widths", ctypes.c_void_p),
    )


ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.GELU: 1, nn.ReLU: 2}
POOLINGS = {None: 0, "avg": 1, "max": 2, "sum": 3, "first": 4, "ada": 5}
QUERIES = {"self": 0, "mean": 1, "learned": 2}


@dataclass(frozen=True)
class NetworkSizes:
    """Sizes and options of a network, without those of a batch.

    Args:
        features: F, number of features of a token; 0 if the input is embedded already.
        types: K, number of types with a learned embedding; 0 for none.
        type_width: width of the type embedding.
        input_activation: code of the activation after the embedding.
        extra: number of learned tokens before the others.
        dim: D, width of the vectors.
        layers: number of layers.
        heads: number of attention heads of each layer.
        dim_ff: width of the feed-forward part.
        activation: code of its activation.
        scale: factor of the scores.
        pooling: code of the pooling head; 0 for the encoder's vectors.
        pooling_heads: number of heads of AdaPool.
        query: code of AdaPool's query.
        residual: add the query to AdaPool's result.
        pooling_scale: factor of AdaPool's scores.
    """

    features: int
    types: int
    type_width: int
    input_activation: int
    extra: int
    dim: int
    layers: int
    heads: int
    dim_ff: int
    activation: int
    scale: float
    pooling: int = 0
    pooling_heads: int = 1
    query: int = 0
    residual: bool = False
    pooling_scale: float = 1.0


class NetworkInputs(NamedTuple):
    """A network and its tokens, as the kernels read them."""

    sizes: NetworkSizes
    values: Tensor
    """``(B, N, F)`` features, or ``(B, N, D)`` vectors if ``sizes.features`` is 0."""
    types: Tensor | None
    """``(B, N)`` int64, or None."""
    padding: Tensor | None
    """``(B, N)`` bool, True = ignore, or None."""
    parameters: Sequence[Tensor]
    """The weights, in the order of ``Parameters`` in network.hpp."""
    dropout: float = 0.0
    """Probability after each feed-forward part."""
    seed: int = 0
    """Seed of the dropout."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the kernel that fits this machine; None if none was built.

    A kernel that was built from other sources than those here is not used, and a
    warning says so.
    """
    built = {path.stem.removeprefix("kernel-"): path for path in _libraries()}
    if not built:
        return None
    kernel = ctypes.CDLL(str(built["base" if "base" in built else "v2"]))
    level = kernel.marl_pool_level()
    if f"v{level}" in built:
        kernel = ctypes.CDLL(str(built[f"v{level}"]))
    kernel.marl_pool_sources.restype = ctypes.c_char_p
    if kernel.marl_pool_sources() != _hash_sources():
        warnings.warn(
            "the compiled kernel is of another version of marl_pool, so torch computes "
            "everything: install the package again",
            stacklevel=2,
        )
        return None
    return kernel


def _libraries() -> list[Path]:
    """Find the libraries: beside this file, or of an editable installation."""
    installed = Path(sysconfig.get_path("platlib"), "marl_pool", "kernels", "native")
    folders = (Path(__file__).parent, installed)
    each = (list(folder.glob("kernel-*.so")) for folder in folders)
    return next(filter(None, each), [])


def _hash_sources() -> bytes:
    """Hash the sources as CMakeLists.txt does."""
    sources = sorted(Path(__file__).parent.glob("src/*.[ch]pp"))
    each = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources]
    return hashlib.sha256("".join(each).encode()).hexdigest().encode()


def run(inputs: NetworkInputs) -> Tensor:
    """Run the network forward.

    Returns:
        ``(B, D)``, or ``(B, extra + N, D)`` without a pooling head.

    Raises:
        IndexError: a type is out of range.
        MemoryError: there is no memory for the call.
    """
    out = new_result(inputs)
    KernelCall(inputs)("run", pointer(out), None, None, None)
    return out


def new_result(inputs: NetworkInputs) -> Tensor:
    """Return memory for the result of `run`."""
    sizes, (rows, tokens) = inputs.sizes, inputs.values.shape[:2]
    inner = () if sizes.pooling else (sizes.extra + tokens,)
    return inputs.values.new_empty((rows, *inner, sizes.dim))


def gradients(
    inputs: NetworkInputs, out_gradient: Tensor, *, for_values: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gradients by the values, if asked for, and by each parameter.

    Args:
        inputs: those of `run`.
        out_gradient: gradient by the result of `run`.
        for_values: compute the gradient by the values, too.
    """
    values, parameters = inputs.values, inputs.parameters
    flat = values.new_empty(sum(map(torch.numel, parameters)))
    parts = torch._utils._unflatten_dense_tensors(flat, parameters)
    found = values.new_empty(values.shape) if for_values else None  # contiguous
    out_gradient = out_gradient.contiguous()
    KernelCall(inputs)(
        "run", None, pointer(out_gradient), pointers(parts), pointer(found)
    )
    return found, list(parts)


@functools.cache
def _network_sizes(sizes: NetworkSizes) -> _Sizes:
    return _Sizes(**vars(sizes))


class Weights(tuple[Tensor, ...]):
    """Weights as the kernel reads them: contiguous, on the CPU, of one dtype."""

    dtype: torch.dtype
    addresses: ctypes.Array[ctypes.c_void_p]
    """Addresses of their numbers."""

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> "Weights":
        """Return the parameters, with a copy of each that is not contiguous."""
        if isinstance(parameters, Weights):
            return parameters
        weights = cls([parameter.contiguous() for parameter in parameters])
        weights.dtype = parameters[0].dtype
        for weight in weights:
            require(weight.is_cpu, "tensors on one device")
            require(weight.dtype == weights.dtype, "one dtype")
        weights.addresses = pointers(weights)
        return weights

    def keep(self) -> None:
        """Keep the memory, even if a parameter is given another."""
        self._memory = [weight.untyped_storage() for weight in self]


class KernelCall:
    """The network's arguments of one call, checked before their pointers are passed.

    Attributes:
        arguments: what every entry of the library takes first; valid as long as this
            object.
    """

    def __init__(self, inputs: NetworkInputs) -> None:
        sizes, values, types, padding, parameters, dropout, seed = inputs
        rows, tokens, width = values.shape
        require(width == (sizes.features or sizes.dim), "tensors of fitting shapes")
        self.dtype = values.dtype
        self.tensors = [values.contiguous(), types, padding]
        for i, dtype in ((1, torch.int64), (2, torch.bool)):
            tensor = self.tensors[i]
            if tensor is not None:
                require(tensor.shape == (rows, tokens), "tensors of fitting shapes")
                self.tensors[i] = tensor.to(dtype).contiguous()
        self.weights = Weights.of(parameters)
        require(self.weights.dtype == self.dtype, "one dtype")
        for tensor in self.tensors:
            require(tensor is None or tensor.is_cpu, "tensors on one device")
        self.sizes = _Sizes.from_buffer_copy(_network_sizes(sizes))
        self.sizes.rows, self.sizes.tokens = rows, tokens
        self.sizes.dropout, self.sizes.seed = dropout, seed
        self.arguments: tuple[Any, ...] = (
            ctypes.byref(self.sizes),
            *map(pointer, self.tensors),
            self.weights.addresses,
        )

    def __call__(self, name: str, *arguments: Any) -> int:
        """Call an entry of the library, and return its status.

        Args:
            name: name of the entry, without the dtype.
            *arguments: what the entry takes after the network's arguments.
        """
        status = entry(name, self.dtype)(*self.arguments, *arguments, num_threads())
        validate(status)
        if status == _UNKNOWN_TYPE:
            raise IndexError(f"types: expected 0 to {self.sizes.types - 1}")
        return status


def entry(name: str, dtype: torch.dtype) -> Any:
    """Return a function of the library, for float32 or float64."""
    number = {torch.float32: "float", torch.float64: "double"}[dtype]
    return getattr(library(), f"marl_pool_{name}_{number}")


def validate(status: int) -> None:
    """Raise the error that a status of any entry stands for."""
    if status == _NO_MEMORY:
        raise MemoryError("the compiled kernel could not allocate its memory")


def num_threads() -> int:
    """Return the number of threads that the kernel may use."""
    return _threads.get() or torch.get_num_threads()


def mlp_sizes(
    activation: int, rows: int, inputs: int, parameters: Sequence[Tensor]
) -> MlpSizes:
    """Return the sizes of a perceptron, whose parameters have to fit each other.

    Args:
        activation: code of the activation between layers.
        rows: number of rows.
        inputs: width of the input.
        parameters: weight and bias of each layer.
    """
    widths = (inputs, *[bias.shape[0] for bias in parameters[1::2]])
    array, shapes = _mlp_widths(widths)
    require(
        [tensor.shape for tensor in parameters] == shapes, "tensors of fitting shapes"
    )
    return MlpSizes(rows, len(widths) - 1, activation, ctypes.addressof(array))


@functools.cache
def _mlp_widths(
    widths: tuple[int, ...],
) -> tuple[ctypes.Array[ctypes.c_int32], list[tuple[int, ...]]]:
    """Return the widths for the kernel, and the shapes of weights and biases."""
    layers = [((outputs, inputs), (outputs,)) for inputs, outputs in pairwise(widths)]
    array = (ctypes.c_int32 * len(widths))(*widths)
    return array, [shape for layer in layers for shape in layer]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """Return the address of a tensor's numbers; None for None."""
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of the tensors' numbers."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
