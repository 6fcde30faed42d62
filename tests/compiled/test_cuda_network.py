"""The GPU's kernel, compiled for a CPU, against the package's modules in float64."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import cuda_on_cpu
from helpers.set_networks import errors, make_network, make_tokens, results
from marl_pool.compiled import compile
from marl_pool.compiled import network as compiled_network
from marl_pool.compiled.cuda import call as cuda
from marl_pool.compiled.cuda import compiler
from marl_pool.compiled.cuda.compiler import CompilerError
from marl_pool.compiled.native import call as native
from marl_pool.compiled.native.call import NetworkInputs, NetworkSizes

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.COMPILER is None or native.library() is None,
    reason="the kernel cannot be compiled: it needs g++",
)

QUICK: list[dict[str, Any]] = [
    {"pooling": "ada", "num_tokens": 5},
    {"pooling": "ada, learned", "head_width": 3, "num_tokens": 33},
    {"pooling": "cls", "head_width": 2, "activation": "relu"},
    {"pooling": "gated", "head_width": 8, "input_activation": None},
]
SLOW: list[dict[str, Any]] = [
    {"pooling": "ada", "head_width": 2, "num_tokens": 1},
    {"pooling": "ada", "head_width": 8, "num_tokens": 130},
    {"pooling": "ada", "types": 1, "type_embedding": 0},
    {"pooling": "ada", "std": 1.0, "type_embedding": "add"},
    {"pooling": "ada, mean", "head_width": 2, "input_activation": "relu"},
    {"pooling": "avg", "num_tokens": 33},
    {"pooling": "max", "head_width": 3, "num_tokens": 200},
    {"pooling": "sum", "head_width": 2, "layers": 1},
    {"pooling": "cls", "num_tokens": 64},
]


class OnlyForGpus:
    """A stand-in for the CPU's kernel."""

    POOLINGS, QUERIES = native.POOLINGS, native.QUERIES

    def __init__(self) -> None:
        self.calls = 0

    def run(self, inputs: NetworkInputs) -> Tensor:
        self.calls += 1
        return cuda.run(inputs)

    def gradients(
        self, inputs: NetworkInputs, gradient: Tensor, *, for_values: bool
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        self.calls += 1
        return cuda.gradients(inputs, gradient, for_values=for_values)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> OnlyForGpus:
    kernel = OnlyForGpus()
    # Two warps cover every case of four; a CPU runs a thread for each lane.
    monkeypatch.setattr(cuda, "_THREADS", 64)
    monkeypatch.setattr(cuda, "_launcher", cuda_on_cpu.launcher)
    monkeypatch.setattr(compiled_network, "kernel", kernel)
    return kernel


def largest_error(rows: int, *, padded: bool, **options: Any) -> float:
    network = make_network(**options).double()
    tokens = make_tokens(network, rows, padded=padded)
    expected = results(network, tokens, "torch")
    return max(errors(results(network, tokens, "auto"), expected))


@pytest.mark.parametrize("options", QUICK)
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_float64_is_torchs(
    kernel: OnlyForGpus, options: dict[str, Any], rows: int, padded: bool
) -> None:
    assert largest_error(rows, padded=padded, **options) < 1e-9
    assert kernel.calls == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", SLOW)
def test_float64_is_torchs_with_further_options(
    kernel: OnlyForGpus, options: dict[str, Any]
) -> None:
    assert largest_error(4, padded=True, **options) < 1e-9
    assert kernel.calls == 2


@pytest.mark.slow
def test_float32_is_as_precise_as_torchs(kernel: OnlyForGpus) -> None:
    network = make_network("ada", num_tokens=20)
    tokens = make_tokens(network, 40, padded=True)
    ours, torchs = (results(network, tokens, name) for name in ("auto", "torch"))
    exact = results(network.double(), tokens, "torch")
    ratios = [
        a / b
        for a, b in zip(errors(ours, exact), errors(torchs, exact), strict=True)
        if b
    ]
    assert sorted(ratios)[len(ratios) // 2] < 2
    assert kernel.calls == 2


@pytest.mark.parametrize("size", [1e19, -1e30, 1e38])
def test_a_huge_feature_gives_no_nan(kernel: OnlyForGpus, size: float) -> None:
    """Its square overflows in float32."""
    network = make_network("cls", num_tokens=5)
    tokens = make_tokens(network, 9, padded=True)
    tokens.features[5, 1, 2] = size
    assert compile(network)(tokens).isfinite().all()
    assert kernel.calls == 1


@pytest.mark.parametrize("change", ["weight", "padding", "gradient"])
def test_sizes_are_checked(kernel: OnlyForGpus, change: str) -> None:
    network = make_network("ada", num_tokens=5).double()
    tokens = make_tokens(network, 9)
    inputs = compile(network).inputs(tokens._replace(features=tokens.features.double()))
    assert inputs is not None
    gradient = torch.ones(9, network.dim_out, dtype=torch.float64)
    if change == "weight":
        weight, *parameters = inputs.parameters
        inputs = inputs._replace(parameters=[weight[:1], *parameters])
    elif change == "padding":
        inputs = inputs._replace(padding=tokens.padding[:, :-1])
    else:
        gradient = gradient[:, :-1]
    with pytest.raises(ValueError, match="compiled kernel: expected"):
        cuda.gradients(inputs, gradient)


@pytest.mark.slow
def test_gradients_do_not_depend_on_other_blocks(
    kernel: OnlyForGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network("max", num_tokens=20).double()  # three sets a block
    tokens = make_tokens(network, 20)
    outputs = []
    for blocks in (1, 3, 99):
        monkeypatch.setattr(cuda, "_BLOCKS", blocks)
        outputs.append(results(network, tokens, "auto"))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-12, atol=1e-12)


def test_a_type_out_of_range_gives_no_number(kernel: OnlyForGpus) -> None:
    network = make_network("avg").double()
    tokens = make_tokens(network, 3)
    tokens.types[1, 2] = 99
    with torch.no_grad():
        out = compile(network)(tokens._replace(features=tokens.features.double()))
    assert out.isnan().any(1).tolist() == [False, True, False]


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    cuda._compiles.cache_clear()
    yield
    cuda._compiles.cache_clear()


SIZES = NetworkSizes(4, 3, 4, 0, 0, 8, 2, 8, 32, 1, 1.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A device with 227 KB of shared memory, for which everything compiles."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "nvrtc", object)
    monkeypatch.setattr(cuda, "most_shared_memory", lambda device: 232_448)
    monkeypatch.setattr(cuda, "_launcher", lambda *arguments: None)
    return monkeypatch


@pytest.mark.parametrize(
    ("changes", "tokens", "fits"),
    [
        ({}, 32, True),
        ({}, 256, True),
        ({}, 257, False),
        ({"extra": 1}, 256, False),
        ({"dim": 32}, 32, False),
        ({"heads": 3}, 32, False),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_sizes_that_fit(changes: dict[str, Any], tokens: int, fits: bool) -> None:
    sizes = NetworkSizes(**{**vars(SIZES), **changes})
    assert cuda.can_run(sizes, tokens, torch.float32, 0) is fits


def test_shared_memory_limits_the_sets(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(cuda, "most_shared_memory", lambda device: 90_000)
    assert cuda.can_run(SIZES, 32, torch.float32, 0)
    assert not cuda.can_run(SIZES, 32, torch.float64, 0)


def test_torch_computes_what_was_not_compiled(gpu: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise CompilerError("marl_pool.cu(1): error")

    gpu.setattr(cuda, "_launcher", fail)
    with pytest.warns(UserWarning, match=r"not compiled.*marl_pool.cu\(1\): error"):
        assert not cuda.can_run(SIZES, 32, torch.float32, 0)


def test_missing_nvrtc_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.warns(UserWarning, match=r"no libnvrtc.so.99 was found"):
        assert compiler.nvrtc.__wrapped__() is None
