"""Calls of the compiled kernel: a whole set transformer, forward or with gradients.

The kernel's lanes are rows of the batch: as many sets as a register has numbers, 16 of
float32 with AVX-512, go through embedding, layers and pooling while they stay in the
cache. The forward pass is recomputed for the gradient. Start reading in
``src/network.hpp``.
"""

import ctypes
import functools
import hashlib
import operator
import sysconfig
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.tokens import unknown_type
from marl_pool.utils.devices import torch_threads

CPU = torch.device("cpu")
_UNKNOWN_TYPE, _NO_MEMORY = 1, 2  # Status of kernel.hpp
# `map` with these is faster than a comprehension, in checks before every call.
_SHAPE, _DTYPE, _IS_CPU = map(operator.attrgetter, ("shape", "dtype", "is_cpu"))
_threads = ContextVar[int | None]("threads", default=None)


@contextmanager
def threads_for_kernel() -> Iterator[None]:
    """Leave torch's threads to the kernel; torch itself computes with one.

    Torch's threads synchronize at every small operation. If another process uses a
    core, they cost several times what they gain; the kernel's meet once per call.
    """
    token = _threads.set(torch.get_num_threads())
    try:
        with torch_threads(1):
            yield
    finally:
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
    """Sizes and options of a network, without a batch's.

    Args:
        features: F, number of features of a token; 0 if the input is already embedded.
        types: K, number of types with a learned embedding; 0 for none.
        type_width: width of the type embedding.
        input_activation: code of the activation after the embedding.
        extra: number of learned tokens, which come first.
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
def parameter_shapes(sizes: NetworkSizes) -> list[tuple[int, ...]]:
    """Return the weights' shapes, in the order of ``Parameters`` in network.hpp."""
    vector, square = (sizes.dim,), (sizes.dim, sizes.dim)
    shapes: list[tuple[int, ...]] = []
    if sizes.features:
        shapes += [(sizes.dim, sizes.features + sizes.type_width), vector]
    if sizes.types:
        shapes.append((sizes.types, sizes.type_width))
    if sizes.extra:
        shapes.append((sizes.extra, sizes.dim))
    attention = [vector, vector, square, square, square, square]
    up, down = (sizes.dim_ff, sizes.dim), (sizes.dim, sizes.dim_ff)
    feedforward = [vector, vector, up, (sizes.dim_ff,), down, vector]
    shapes += sizes.layers * (attention + feedforward)
    if sizes.pooling == POOLINGS["ada"]:
        shapes += 4 * [square]
        if sizes.query == QUERIES["learned"]:
            shapes.append(vector)
    return shapes


def require(holds: bool, expected: str) -> None:
    """Raise an error unless the kernel reads and writes within its arguments' memory.

    This is not an ``assert``, which ``python -O`` leaves out.

    Raises:
        ValueError: ``holds`` is False.
    """
    if not holds:
        raise ValueError(f"arguments of the compiled kernel: expected {expected}")


def require_memory(
    tensor: Tensor,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Raise an error unless a tensor is plain, contiguous memory of a shape and dtype.

    Raises:
        ValueError: it is anything else.
    """
    if (
        tensor.shape != tuple(shape)
        or tensor.dtype != dtype
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        # The text is made only here, since most tensors fit.
        require(
            False,
            f"{name} contiguous, of shape {tuple(shape)}, {dtype} and on {device}, "
            f"got {tuple(tensor.shape)}, {tensor.dtype} and {tensor.device}",
        )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the kernel that fits this machine; None if none was built.

    A kernel built from other sources is not used, and a warning says so.
    """
    built = {path.stem.removeprefix("kernel-"): path for path in _libraries()}
    if not built:
        return None
    # The simplest library runs on every machine, and knows which level this one has.
    kernel = ctypes.CDLL(str(built["base" if "base" in built else "v2"]))
    level = kernel.marl_pool_level()
    if f"v{level}" in built:
        kernel = ctypes.CDLL(str(built[f"v{level}"]))
    kernel.marl_pool_sources.restype = ctypes.c_char_p
    if kernel.marl_pool_sources() != _hash_sources():
        warnings.warn(
            "the compiled kernel is from another version of marl_pool, so torch "
            "computes everything: install the package again",
            stacklevel=2,
        )
        return None
    return kernel


def _libraries() -> list[Path]:
    """Find the libraries: beside this file, or in an editable installation."""
    installed = Path(sysconfig.get_path("platlib"), "marl_pool", "compiled", "native")
    folders = (Path(__file__).parent, installed)
    libraries = (list(folder.glob("kernel-*.so")) for folder in folders)
    return next(filter(None, libraries), [])


def _hash_sources() -> bytes:
    """Hash the sources as CMakeLists.txt does."""
    sources = sorted(Path(__file__).parent.glob("src/*.[ch]pp"))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources]
    return hashlib.sha256("".join(digests).encode()).hexdigest().encode()


def run(inputs: NetworkInputs) -> Tensor:
    """Run the network forward.

    Returns:
        ``(B, D)``, or ``(B, extra + N, D)`` without a pooling head.

    Raises:
        InputError: a type is out of range.
        MemoryError: there is no memory for the call.
    """
    out = new_result(inputs)
    KernelCall(inputs)("run", pointer(out), None, None, None)
    return out


def new_result(inputs: NetworkInputs) -> Tensor:
    """Return memory for the result of `run`."""
    return inputs.values.new_empty(result_shape(inputs))


def result_shape(inputs: NetworkInputs) -> tuple[int, ...]:
    """Return the shape of the result of `run`."""
    sizes, (rows, tokens) = inputs.sizes, inputs.values.shape[:2]
    inner = () if sizes.pooling else (sizes.extra + tokens,)
    return rows, *inner, sizes.dim


def gradients(
    inputs: NetworkInputs, out_gradient: Tensor, *, for_values: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gradients of the values, if requested, and of each parameter.

    Args:
        inputs: as in `run`.
        out_gradient: gradient of the result of `run`.
        for_values: compute the gradient of the values too.
    """
    call = KernelCall(inputs)
    values, parameters = inputs.values, inputs.parameters
    # One allocation for the gradients of all parameters.
    flat = values.new_empty(sum(map(torch.numel, parameters)))
    parts = torch._utils._unflatten_dense_tensors(flat, parameters)
    # Contiguous, unlike what `empty_like` returns.
    value_gradient = values.new_empty(values.shape) if for_values else None
    out_gradient = out_gradient.contiguous()
    require_memory(out_gradient, "gradient", result_shape(inputs), values.dtype)
    call("run", None, pointer(out_gradient), pointers(parts), pointer(value_gradient))
    return value_gradient, list(parts)


@functools.cache
def _network_sizes(sizes: NetworkSizes) -> _Sizes:
    # `KernelCall` copies it, which is faster than setting twenty fields.
    return _Sizes(**vars(sizes))


class Weights(tuple[Tensor, ...]):
    """Weights as the kernel reads them: contiguous, on the CPU, of one dtype."""

    dtype: torch.dtype
    shapes: Sequence[Sequence[int]]
    addresses: ctypes.Array[ctypes.c_void_p]
    """Addresses of their numbers."""

    @classmethod
    def of(
        cls, parameters: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> "Weights":
        """Return the parameters, with a copy of each that is not contiguous.

        Raises:
            ValueError: they have other shapes than the kernel reads, or two dtypes.
        """
        if isinstance(parameters, Weights):
            # They were checked when they were gathered.
            require(parameters.shapes == shapes, "weights of the shapes before")
            return parameters
        actual = list(map(_SHAPE, parameters))
        if actual != shapes:
            require(False, f"weights of shapes {shapes}, got {[*map(tuple, actual)]}")
        weights = cls([parameter.contiguous() for parameter in parameters])
        weights.dtype, weights.shapes = parameters[0].dtype, shapes
        require(all(map(_IS_CPU, weights)), "weights on the CPU")
        require(len(set(map(_DTYPE, weights))) == 1, "weights of one dtype")
        weights.addresses = pointers(weights)
        return weights


class KernelCall:
    """The network's arguments of one call, checked before their pointers are passed.

    Attributes:
        arguments: what every entry of the library takes first; valid as long as this
            object.
    """

    def __init__(self, inputs: NetworkInputs) -> None:
        sizes, values, types, padding, parameters, dropout, seed = inputs
        rows, tokens, width = values.shape
        require(width == (sizes.features or sizes.dim), "values of the network's width")
        self.dtype = values.dtype
        self.tensors = [values.contiguous(), types, padding]
        for i, dtype in ((1, torch.int64), (2, torch.bool)):
            tensor = self.tensors[i]
            if tensor is not None:
                self.tensors[i] = tensor = tensor.to(dtype).contiguous()
                require_memory(tensor, "types and padding", (rows, tokens), dtype)
        self.weights = Weights.of(parameters, parameter_shapes(sizes))
        require(self.weights.dtype == self.dtype, "weights of the values' dtype")
        require(values.is_cpu, "values on the CPU")
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
            _, types, padding = self.tensors
            assert types is not None
            raise unknown_type(types, padding, self.sizes.types)
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


def mlp_arguments(
    activation: int, rows: int, inputs: int, parameters: Sequence[Tensor]
) -> tuple[MlpSizes, Weights]:
    """Return the sizes and weights of a perceptron, whose weights fit each other.

    Args:
        activation: code of the activation between layers.
        rows: number of rows.
        inputs: width of the input.
        parameters: weight and bias of each layer.

    Raises:
        ValueError: they do not fit.
    """
    widths = _mlp_widths(inputs, parameters)
    # The cache keeps the array, of which the sizes hold only the address.
    array, shapes = _mlp_shapes(widths)
    sizes = MlpSizes(rows, len(widths) - 1, activation, ctypes.addressof(array))
    return sizes, Weights.of(parameters, shapes)


def _mlp_widths(inputs: int, parameters: Sequence[Tensor]) -> tuple[int, ...]:
    return inputs, *[bias.numel() for bias in parameters[1::2]]


@functools.cache
def _mlp_shapes(
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
    # An array converts many integers at once, ctypes one by one.
    addresses = array("Q", [tensor.data_ptr() for tensor in tensors])
    return (ctypes.c_void_p * len(tensors)).from_buffer(addresses)
