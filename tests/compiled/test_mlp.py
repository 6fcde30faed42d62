"""The compiled perceptron, against torch in float64."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.set_networks import (
    LAYOUTS,
    Doubled,
    assert_same_gradients,
    assert_same_second_gradients,
    needs_kernel,
)
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.mlp import CompiledMLP, _MlpCall, compile_mlp
from marl_pool.kernels.functional import ACTIVATIONS, mlp
from marl_pool.utils.devices import torch_threads

pytestmark = needs_kernel


def make(widths: list[int], kind: Any = "gelu", seed: int = 0) -> CompiledMLP:
    module = compile_mlp(mlp(widths, ACTIVATIONS[kind]))
    assert isinstance(module, CompiledMLP)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def results(module: nn.Module, values: Tensor, kernels: Any) -> list[Tensor]:
    """Return the output and all gradients."""
    values = values.clone().requires_grad_()
    with use_kernels(kernels):
        out = module(values)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        inputs = [values, *module.parameters()]
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@given(
    widths=st.lists(st.integers(1, 37), min_size=2, max_size=5),
    batch=st.sampled_from([(0,), (1,), (7,), (3, 5), (17,), (128,), (129,), (2, 150)]),
    kind=st.sampled_from(sorted(ACTIVATIONS)),
    seed=st.integers(0, 99),
)
def test_float64_is_torchs(
    widths: list[int], batch: tuple[int, ...], kind: str, seed: int
) -> None:
    module = make(widths, kind, seed).double()
    values = torch.randn(*batch, widths[0], dtype=torch.float64)
    expected = results(module, values, "torch")
    for ours, torchs in zip(results(module, values, "native"), expected, strict=True):
        assert ours.shape == torchs.shape
        scale = torchs.abs().max() if torchs.numel() else torch.ones(())
        assert torch.all((ours - torchs).abs() <= 1e-12 * scale + 1e-12)


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_float32_is_as_precise_as_torchs(kind: str) -> None:
    ratios = []
    for seed in range(20):
        module, values = make([8, 32, 32, 4], kind, seed), torch.randn(200, 8)
        exact = results(copy.deepcopy(module).double(), values.double(), "torch")
        ours = results(module, values, "native")
        torchs = results(module, values, "torch")
        for a, b, c in zip(ours, torchs, exact, strict=True):
            ratios.append(float((a - c).norm() / (b - c).norm().clamp(min=1e-30)))
    assert torch.tensor(ratios).median() <= 2


@pytest.mark.parametrize("size", [3.0, 6.0, 10.0, 100.0, 1000.0, 1e6])
@torch.no_grad()
def test_gelu_of_large_numbers_in_float32(size: float) -> None:
    """A large negative one gives 0, not a rounding error times the number."""
    module = mlp([1, 1, 1], nn.GELU)
    for parameter in module.parameters():
        parameter.fill_(float(parameter.dim() == 2))
    values = torch.linspace(-size, size, 1001)[:, None]
    values[500] = math.nan
    with use_kernels("native"):
        actual = compile_mlp(module)(values)
    expected = nn.functional.gelu(values.double())
    torch.testing.assert_close(
        actual.double(), expected, rtol=2e-7, atol=8e-7, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbors(dtype: torch.dtype) -> None:
    module = make([8, 32, 32, 5]).to(dtype)
    values = torch.randn(300, 8, dtype=dtype)
    with use_kernels("native"):
        batch = module(values)
        for first, count in ((0, 1), (3, 17), (120, 129), (299, 1)):
            part = module(values[first : first + count])
            assert torch.equal(part, batch[first : first + count])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    module, values = make([8, 32, 32, 5]), torch.randn(20_000, 8)
    outputs = []
    for count in (1, 3):
        with torch_threads(count):
            outputs.append(results(module, values, "native"))
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
@pytest.mark.parametrize("size", [1e19, -1e30, 1e38, -3e38])
@pytest.mark.parametrize("factor", [0.01, 0.2, 1.0])
def test_a_huge_number_gives_no_nan(
    activation: type[nn.Module], size: float, factor: float
) -> None:
    layers = compile_mlp(mlp([5, 17, 3], activation))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(factor)
    values = torch.randn(9, 5)
    values[3, 1] = size
    values.requires_grad_()
    for kernels in ("torch", "native"):
        with use_kernels(kernels):
            out = layers(values)
            parts = [values, *layers.parameters()]
            gradients = torch.autograd.grad(out, parts, torch.ones_like(out))
        assert not any(part.isnan().any() for part in (out, *gradients))


def test_sizes_and_types_are_checked() -> None:
    module = make([3, 4, 2]).double()
    for values in (torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 3)):
        with pytest.raises(ValueError, match="compiled kernel"):
            _MlpCall(module).run(values, *module.parameters())


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (9,), (9, 9), (2, 3, 4)])
def test_a_parameter_of_another_shape_is_left_to_torch(
    name: str, shape: tuple[int, ...]
) -> None:
    module = mlp([3, 4, 2], nn.GELU)
    layer, part = name.split(".")
    setattr(module[int(layer)], part, nn.Parameter(torch.ones(shape)))
    assert compile_mlp(module) is module


def test_weights_follow_when_they_are_replaced() -> None:
    module, source = make([3, 4, 2]), make([3, 4, 2], seed=1)
    module.original.load_state_dict(source.state_dict(), assign=True)
    values = torch.randn(6, 3)
    assert torch.equal(module(values), source(values))


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_a_parameter_that_shrinks_before_the_gradient_is_refused(name: str) -> None:
    module = make([3, 4, 2])
    layer, part = name.split(".")
    with use_kernels("native"):
        loss = module(torch.randn(6, 3)).sum()
        getattr(module[int(layer)], part).data = torch.ones(1)
        with pytest.raises((ValueError, RuntimeError)):
            loss.backward()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_any_layout_are_torchs(layout: str) -> None:
    module, values = make([6, 5, 3]).double(), torch.randn(20, 6).double()
    assert_same_gradients(module, values, LAYOUTS[layout])


def test_state_dict_is_that_of_a_sequence() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    module = compile_mlp(plain)
    assert module.state_dict().keys() == plain.state_dict().keys()
    restored = make([3, 4, 2])
    restored.load_state_dict(plain.state_dict())
    values = torch.randn(6, 3)
    torch.testing.assert_close(restored(values), plain(values))


def test_tensors_in_other_layouts_give_the_same() -> None:
    module, values = make([6, 5, 2]).double(), torch.randn(6, 20).double().T
    expected = results(module, values.contiguous(), "native")
    assert all(map(torch.equal, results(module, values, "native"), expected))


def test_frozen_parts_get_no_gradient() -> None:
    module, values = make([3, 4, 2]), torch.randn(6, 3)
    module[0].requires_grad_(False)
    module(values).sum().backward()
    assert module[0].weight.grad is None
    assert module[2].weight.grad.any()


def test_a_gradient_of_the_gradient_is_torchs() -> None:
    module, values = make([3, 4, 2]).double(), torch.randn(6, 3).double()
    assert_same_second_gradients(module, values)


def test_values_that_change_before_the_gradient_are_rejected() -> None:
    values = torch.randn(6, 3)
    loss = make([3, 4, 2])(values).sum()
    values.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


FIRST, GELU, LAST = nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)


@pytest.mark.parametrize(
    "layers",
    [
        [Doubled(3, 4), GELU, LAST],
        [FIRST, GELU, hooked(nn.Linear(4, 2))],
        [FIRST, GELU, LAST, nn.Tanh()],
        [FIRST, nn.Tanh(), LAST],
        [FIRST, nn.GELU("tanh"), LAST],
        [FIRST, GELU, nn.Linear(4, 2, bias=False)],
        [FIRST, GELU, nn.Linear(4, 4), nn.ReLU(), LAST],
        [FIRST, GELU],
        [GELU],
        [],
    ],
    ids=lambda layers: " ".join(type(layer).__name__ for layer in layers),
)
def test_unsupported_modules_fall_back_to_torch(layers: list[nn.Module]) -> None:
    module = nn.Sequential(*layers)
    assert compile_mlp(module) is module
    assert isinstance(compile_mlp(mlp([3, 4, 2], nn.GELU)), CompiledMLP)


def test_modes_of_torch_are_left_to_torch() -> None:
    module, values = make([3, 4, 2]), torch.randn(6, 3)
    with use_kernels("torch"):
        assert torch.equal(module(values), module.original(values))
    with torch.autocast("cpu"):
        assert module(values).dtype == torch.bfloat16
    assert make([3, 4, 2]).bfloat16()(values.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(module)(values), module(values))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(6, 4))
