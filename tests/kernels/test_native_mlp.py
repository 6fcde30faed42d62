"""The compiled perceptron, against torch in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from marl_pool.kernels.native import call

pytestmark = pytest.mark.skipif(
    call.library() is None, reason="no kernel was compiled: it needs g++ or clang"
)

KINDS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


def make(widths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        shape
        for inputs, outputs in pairwise(widths)
        for shape in ((outputs, inputs), (outputs,))
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]


def in_torch(kind: str, values: Tensor, parameters: list[Tensor]) -> Tensor:
    activate = KINDS[kind]()
    last = len(parameters) - 2
    for i in range(0, len(parameters), 2):
        values = nn.functional.linear(values, *parameters[i : i + 2])
        values = values if i == last else activate(values)
    return values


def by_torch(kind: str, values: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    tensors = [tensor.clone().requires_grad_() for tensor in (values, *parameters)]
    out = in_torch(kind, tensors[0], tensors[1:])
    found = torch.autograd.grad((out * _weight(out)).sum(), tensors)
    return [out.detach(), *found]


def by_kernel(kind: str, values: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    code = call.ACTIVATIONS[kind]
    out = call.run_mlp(code, values, parameters)
    found, each = call.mlp_gradients(
        code, values, parameters, _weight(out), for_values=True
    )
    assert found is not None
    return [out, found, *each]


def _weight(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)


@given(
    widths=st.lists(st.integers(1, 37), min_size=2, max_size=5),
    rows=st.sampled_from([0, 1, 7, 8, 15, 16, 17, 64, 128, 129, 300]),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 99),
)
def test_float64_is_torchs(widths: list[int], rows: int, kind: str, seed: int) -> None:
    parameters = make(widths, seed)
    values = torch.randn(rows, widths[0], dtype=torch.float64)
    expected = by_torch(kind, values, parameters)
    for got, wanted in zip(by_kernel(kind, values, parameters), expected, strict=True):
        assert got.shape == wanted.shape
        scale = wanted.abs().max() if wanted.numel() else torch.ones(())
        assert torch.all((got - wanted).abs() <= 1e-12 * scale + 1e-12)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_float32_is_as_precise_as_torchs(kind: str) -> None:
    ratios = []
    for seed in range(20):
        parameters = [0.3 * tensor for tensor in make([8, 32, 32, 4], seed)]
        values = torch.randn(200, 8, dtype=torch.float64)
        exact = by_torch(kind, values, parameters)
        single = values.float(), [tensor.float() for tensor in parameters]
        exact = by_torch(kind, single[0].double(), [p.double() for p in single[1]])
        for a, b, c in zip(
            by_kernel(kind, *single), by_torch(kind, *single), exact, strict=True
        ):
            ratios.append(float((a - c).norm() / (b - c).norm().clamp(min=1e-30)))
    assert torch.tensor(ratios).median() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_depends_on_itself_alone(dtype: torch.dtype) -> None:
    parameters = [tensor.to(dtype) for tensor in make([8, 32, 32, 5])]
    values = torch.randn(300, 8, dtype=dtype)
    together = call.run_mlp(1, values, parameters)
    for first, count in ((0, 1), (3, 17), (120, 129), (299, 1)):
        part = call.run_mlp(1, values[first : first + count], parameters)
        assert torch.equal(part, together[first : first + count])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    parameters = [tensor.float() for tensor in make([8, 32, 32, 5])]
    values = torch.randn(20_000, 8)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(by_kernel("gelu", values, parameters))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def test_sizes_and_types_are_checked() -> None:
    parameters = make([3, 4, 2])
    for values in (torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 3)):
        with pytest.raises(AssertionError):
            call.run_mlp(1, values, parameters)
