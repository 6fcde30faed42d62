"""Every registered head and encoder in less usual modes of torch.

Inference mode, functorch transforms, an empty batch, another default dtype, tracing
and second derivatives.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from helpers.samples import (
    DIM,
    ENCODER_VARIANTS,
    NUM_TOKENS,
    SPEC,
    VARIANTS,
    Prepended,
    build_encoder,
    make_head,
    random_set,
    random_tokens,
)
from marl_pool.encoders import make_encoder
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.construction import build
from marl_pool.pooling import POOLING
from marl_pool.pooling.base import Pooling

Variant = tuple[str, str, dict[str, Any]]
ALL: list[Variant] = [
    *(("head", name, options) for name, options in VARIANTS),
    *(("encoder", name, options) for name, options in ENCODER_VARIANTS),
]
LABELS = ["-".join([k, n, *map(str, o.values())]) for k, n, o in ALL]
paddings = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])


class Typeless(nn.Module):
    """An encoder that is called like a head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        return self.encoder(x, padding)


@pytest.fixture(params=ALL, ids=LABELS)
def module(request: pytest.FixtureRequest) -> nn.Module:
    """A float64 head or encoder that takes ``(x, padding, types)``."""
    kind, name, options = request.param
    if kind == "head":
        return Prepended(make_head(name, **options))
    return Typeless(build_encoder(name, **options))


def inputs(padded: bool, **sizes: int) -> tuple[Tensor, Tensor | None, Tensor]:
    x, padding, types = random_set(**sizes)
    return x, padding if padded else None, types


def in_a_new_thread(function: Callable[[], None]) -> None:
    """Call ``function`` in a thread that has no scratch memory yet."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


# Inference mode


@paddings
def test_a_call_in_inference_mode_leaves_later_gradients_alone(
    module: nn.Module, padded: bool
) -> None:
    x, padding, types = inputs(padded)

    def infer_then_learn() -> None:
        with torch.inference_mode():
            expected = module(x, padding, types)
        with torch.no_grad():
            assert torch.equal(module(x, padding, types), expected)
        learned = x.clone().requires_grad_()
        result = module(learned, padding, types)
        torch.testing.assert_close(result.detach(), expected.clone())
        result.sum().backward()
        assert learned.grad is not None
        assert learned.grad.isfinite().all()

    in_a_new_thread(infer_then_learn)


@pytest.mark.parametrize("pooling", ["ada", "cls", "flatten", "max"])
def test_a_network_in_inference_mode_leaves_later_gradients_alone(pooling: str) -> None:
    network = SetNetwork(
        SPEC, encoder={"name": "transformer"}, pooling={"name": pooling}, seed=0
    )
    tokens = random_tokens()

    def infer_then_learn() -> None:
        with torch.inference_mode():
            expected = network(tokens)
        result = network(tokens)
        torch.testing.assert_close(result.detach(), expected.clone())
        result.sum().backward()

    in_a_new_thread(infer_then_learn)
    assert any(part.grad is not None for part in network.parameters())


# Functorch transforms


@paddings
def test_vmap_is_a_loop(module: nn.Module, padded: bool) -> None:
    x, padding, types = inputs(padded, batch=6)
    sets = [
        part if part is None else part.unflatten(0, (3, 2))
        for part in (x, padding, types)
    ]
    dims = tuple(None if part is None else 0 for part in sets)
    output = torch.func.vmap(module, in_dims=dims)(*sets)
    torch.testing.assert_close(output.flatten(0, 1), module(x, padding, types))


def test_vmap_over_parameters_is_a_loop(module: nn.Module) -> None:
    arguments = inputs(True)
    scales = torch.tensor([1.0, 0.5], dtype=torch.float64)
    parameters = {key: part.detach() for key, part in module.named_parameters()}

    def member(scale: Tensor) -> Tensor:
        scaled = {key: part * scale for key, part in parameters.items()}
        return functional_call(module, scaled, arguments)

    outputs = torch.func.vmap(member)(scales)
    for row, scale in zip(outputs, scales, strict=True):
        torch.testing.assert_close(row, member(scale))


@paddings
def test_func_grad_is_autograd(module: nn.Module, padded: bool) -> None:
    x, padding, types = inputs(padded)

    def loss(x: Tensor) -> Tensor:
        return module(x, padding, types).square().sum()

    gradient = torch.func.grad(loss)(x)
    (expected,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    torch.testing.assert_close(gradient, expected)


# An empty batch


@paddings
def test_a_batch_of_zero_has_a_result_and_a_gradient(
    module: nn.Module, padded: bool
) -> None:
    x, padding, types = inputs(padded)
    expected = module(x, padding, types)
    empty = x[:0].clone().requires_grad_()
    mask = None if padding is None else padding[:0]
    result = module(empty, mask, types[:0])
    assert result.shape == (0, *expected.shape[1:])
    assert result.dtype == expected.dtype
    result.sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, NUM_TOKENS, DIM)
    for label, parameter in module.named_parameters():
        assert parameter.grad is not None, label
        assert not parameter.grad.any(), label


# Another default dtype


@pytest.mark.parametrize(("kind", "name", "options"), ALL, ids=LABELS)
@paddings
def test_everything_follows_the_default_dtype(
    kind: str, name: str, options: dict[str, Any], padded: bool
) -> None:
    x, padding, types = inputs(padded)
    torch.set_default_dtype(torch.float64)
    try:
        module: nn.Module
        if kind == "head":
            context = {"dim": DIM, "num_tokens": NUM_TOKENS, "has_self": True}
            head = build(name, POOLING, "pooling", Pooling, dict(options), context)
            module = Prepended(head)
        else:
            module = Typeless(make_encoder(name, **{"dim": DIM, **options}))
        result = module(x.requires_grad_(), padding, types)
        assert result.dtype == torch.float64
        result.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)


# Tracing


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_a_trace_takes_another_batch_size(module: nn.Module) -> None:
    x, padding, types = inputs(True)
    arguments = (x, padding, types)
    few = tuple(part[:2] for part in arguments)
    traced = torch.jit.trace(module, few, check_trace=False)  # checked on a whole batch
    torch.testing.assert_close(traced(*arguments), module(*arguments))


# Second derivatives


@paddings
def test_gradgradcheck(module: nn.Module, padded: bool) -> None:
    x, padding, types = inputs(padded, batch=2)

    def pool(x: Tensor) -> Tensor:
        return module(x, padding, types)

    assert torch.autograd.gradgradcheck(pool, (x.requires_grad_(),), fast_mode=True)
