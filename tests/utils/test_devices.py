"""Constants that are copied to a device once, and denormal numbers."""

import contextlib
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.mlp import compile_mlp
from marl_pool.evaluation.computing import computing
from marl_pool.kernels.functional import mlp
from marl_pool.options.types import Kernels
from marl_pool.utils.devices import constant, torch_threads, without_denormals

flushes = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="needs a processor that can do it"
)


def test_a_constant_of_bools_is_not_that_of_equal_integers() -> None:
    cpu = torch.device("cpu")
    assert constant((1, 0), cpu, torch.bool).dtype == torch.bool
    numbers = constant((1, 0), cpu)
    assert numbers.dtype == torch.int64
    assert constant((1, 0), cpu) is numbers


def test_a_constant_made_in_inference_mode_may_be_part_of_a_gradient() -> None:
    with torch.inference_mode():
        numbers = constant((0.25, 0.125), torch.device("cpu"), torch.float32)
    weights = torch.ones(2, requires_grad=True)
    (weights * numbers).sum().backward()
    assert torch.equal(weights.grad, numbers)


def is_flushed() -> bool:
    return sys.float_info.min / 2 == 0


@flushes
def test_denormals_are_zero_in_the_block_alone() -> None:
    assert not is_flushed()
    flags = []
    with without_denormals():
        thread = threading.Thread(target=lambda: flags.append(is_flushed()))
        thread.start()
        thread.join()
        with without_denormals():
            pass
        assert is_flushed()
        assert not torch.full((9,), 1e-20).square().any()
    assert flags == [True]
    assert torch.full((9,), 1e-20).square().all()
    with computing(1):
        assert is_flushed()
    with contextlib.suppress(ZeroDivisionError), computing(1):
        raise ZeroDivisionError
    assert not is_flushed()


@flushes
@pytest.mark.parametrize(
    ("kernels", "threads"), [("torch", 1), ("native", 1), ("native", 2)]
)
def test_the_kernel_and_torch_agree(kernels: Kernels, threads: int) -> None:
    """Products and gradients of 1e-40, computed by all threads of a call."""
    layer = compile_mlp(mlp([64, 64], nn.ReLU))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.0 if parameter.dim() == 1 else 1e-20)

    def numbers() -> tuple[Tensor, Tensor]:
        values = torch.full((2048, 64), 1e-20)
        out = layer(values)
        (gradient,) = torch.autograd.grad(out, layer[0].weight, values)
        return out, gradient

    # NumPy compares them in this thread; torch's others may be in either state.
    with torch_threads(threads), use_kernels(kernels):
        assert all(part.detach().numpy().all() for part in numbers())
        with without_denormals():
            assert not any(part.detach().numpy().any() for part in numbers())
