"""Set networks with random weights, their results and gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marl_pool.compiled import compile
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.native import call
from marl_pool.networks.set_network import SetNetwork
from marl_pool.tokens import Tokens, TokenSpec

needs_kernel = pytest.mark.skipif(
    call.library() is None, reason="no kernel was compiled: it needs g++ or clang"
)

HEADS: dict[str, dict[str, Any]] = {
    "ada": {"name": "ada"},
    "ada, mean": {"name": "ada", "query": "mean", "num_heads": 2},
    "ada, learned": {"name": "ada", "query": "learned", "residual": True},
    "avg": {"name": "avg"},
    "cls": {"name": "cls"},
    "max": {"name": "max"},
    "sum": {"name": "sum"},
    "gated": {"name": "gated"},  # pooled by torch
    "pma": {"name": "pma"},  # pooled by torch
}
WIDTHS = {1: (4, 4), 2: (6, 3), 3: (6, 2), 4: (8, 2), 8: (8, 1), 16: (32, 2)}
"""Width of the model and number of heads, by the width of a head."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "transpose": lambda out: (out.transpose(0, -1) * torch.arange(len(out))).sum(),
    "slice": lambda out: out.mT.contiguous().view(-1)[::2].sum(),
    "flip": lambda out: (out[::3].flip(0).cumsum(0) ** 2).sum(),
    "one row": lambda out: out[0].sum() * 0,
}
"""Losses whose gradients with respect to an output have different layouts."""


class Doubled(nn.Linear):
    """A subclass of a layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def make_network(
    pooling: str = "ada",
    *,
    head_width: int = 1,
    num_tokens: int = 7,
    layers: int = 2,
    std: float = 0.3,
    seed: int = 0,
    types: int = 3,
    activation: str = "gelu",
    **options: Any,
) -> SetNetwork:
    dim, heads = WIDTHS[head_width]
    spec = TokenSpec(num_tokens, 4, tuple(f"type {i}" for i in range(types)))
    sizes = {
        "dim": dim,
        "num_layers": layers,
        "num_heads": heads,
        "dim_ff": 3 * dim + 1,
    }
    encoder = {"name": "transformer", "activation": activation, **sizes}
    options = {"input_activation": "gelu", "init_std": std, "seed": seed, **options}
    network = SetNetwork(spec, encoder=encoder, pooling=HEADS[pooling], **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:  # biases and LayerNorms are 0 and 1 at first
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.2 * noise
    return network


def make_tokens(
    network: SetNetwork, rows: int, *, padded: bool = False, seed: int = 0
) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, network.spec.num_tokens)
    features = torch.randn(*shape, 4, generator=generator)
    types = torch.randint(0, network.spec.num_types, shape, generator=generator)
    padding = torch.zeros(shape, dtype=torch.bool)
    if padded:
        padding = torch.rand(shape, generator=generator) < 0.4
        padding[0] = True  # an empty set
        padding[-1, types[-1] == 0] = True  # no self token
        features[padding] = math.nan
        types[padding] = 99
    return Tokens(features, types, padding)


def results(network: SetNetwork, tokens: Tokens, kernels: Any) -> list[Tensor]:
    """Return the output and all gradients, in float64."""
    dtype = next(network.parameters()).dtype
    features = tokens.features.to(dtype).requires_grad_()
    with use_kernels(kernels):
        out = compile(network)(Tokens(features, tokens.types, tokens.padding))
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        inputs = [features, *network.parameters()]
        gradients = torch.autograd.grad((out * weight).sum(), inputs)
    return [tensor.detach().double() for tensor in (out, *gradients)]


def errors(outputs: list[Tensor], expected: list[Tensor]) -> list[float]:
    # Gradients may be zero but for rounding (queries to a single token) or all zero
    # (an empty row).
    least = max(1e-3 * float(max(tensor.norm() for tensor in expected)), 1e-30)
    return [
        float((a - b).norm() / b.norm().clamp(min=least))
        for a, b in zip(outputs, expected, strict=True)
    ]


def assert_same_second_gradients(module: nn.Module, inputs: Any) -> None:
    """Compare second derivatives at other parameters than the module's with torch's."""

    def second(kernels: Any) -> tuple[Tensor, ...]:
        parameters = {
            name: (1.5 * parameter).detach().requires_grad_()
            for name, parameter in module.named_parameters()
        }
        weights = list(parameters.values())
        with use_kernels(kernels):
            out = torch.func.functional_call(module, parameters, (inputs,))
            first = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
            return torch.autograd.grad(sum(x.square().sum() for x in first), weights)

    torch.testing.assert_close(second("native"), second("torch"))


def assert_same_gradients(
    module: nn.Module, inputs: Any, loss: Callable[[Tensor], Tensor]
) -> None:
    """Compare gradients of the parameters under ``loss`` with torch's."""
    gradients = []
    for kernels in ("native", "torch"):
        with use_kernels(kernels):
            parameters = list(module.parameters())
            gradients.append(torch.autograd.grad(loss(module(inputs)), parameters))
    torch.testing.assert_close(*gradients)
