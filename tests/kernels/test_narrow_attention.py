"""Attention with narrow heads, against torch's own in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from marl_pool.kernels import attention
from marl_pool.kernels import narrow_attention as kernel
from marl_pool.kernels.attention import MultiHeadAttention
from marl_pool.kernels.narrow_attention import WIDEST, narrow_attention

SCALE = 1 / math.sqrt(8)
widths = pytest.mark.parametrize("width", range(1, WIDEST + 1))


def inputs(
    seed: int,
    *,
    width: int = 1,
    batch: int = 3,
    heads: int = 4,
    queries: int = 5,
    keys: int = 7,
    spread: float = 1.0,
    offset: float = 0.0,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, spread), (keys, spread), (keys, 1.0)]
    return [
        torch.randn(batch, heads, count, width, generator=generator) * wide + offset
        for count, wide in shapes
    ]


def oracle(
    tensors: list[Tensor], padding: Tensor | None, gradient: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    doubles = [tensor.double().requires_grad_() for tensor in tensors]
    keep = None if padding is None else ~padding[:, None, None, :]
    out = F.scaled_dot_product_attention(*doubles, attn_mask=keep, scale=SCALE)
    return out.detach(), torch.autograd.grad(out, doubles, gradient.double())


@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, WIDEST),
    queries=st.sampled_from([1, 5, 32]),
    keys=st.sampled_from([1, 7, 32, 50]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    offset=st.sampled_from([0.0, 5.0]),
    padded=st.booleans(),
)
def test_results_and_gradients_are_torchs(
    seed: int,
    width: int,
    queries: int,
    keys: int,
    spread: float,
    offset: float,
    padded: bool,
) -> None:
    tensors = inputs(
        seed, width=width, queries=queries, keys=keys, spread=spread, offset=offset
    )
    generator = torch.Generator().manual_seed(seed)
    padding = None
    if padded:
        padding = torch.rand(3, keys, generator=generator) < 0.5
        padding[:, -1] = False
    gradient = torch.randn(3, 4, queries, width, generator=generator)
    expected, expected_gradients = oracle(tensors, padding, gradient)
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    out = narrow_attention(*ours, padding, SCALE)
    gradients = torch.autograd.grad(out, ours, gradient)
    # An error of a score is its share of the score, and larger as the gradient is.
    close = {"rtol": 1e-4, "atol": 1e-4 * (1 + spread) * width**2}
    torch.testing.assert_close(out.double(), expected, **close)
    for result, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(result.double(), reference, **close)
    with torch.no_grad():
        torch.testing.assert_close(narrow_attention(*ours, padding, SCALE), out)


@widths
@pytest.mark.parametrize("limit", [kernel.LIMIT, -1e3], ids=["as they are", "shifted"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck_of_both_implementations(
    monkeypatch: pytest.MonkeyPatch, width: int, limit: float, padded: bool
) -> None:
    monkeypatch.setattr(kernel, "LIMIT", limit)
    tensors = [
        t.double().requires_grad_()
        for t in inputs(0, width=width, batch=2, heads=2, queries=3, keys=4)
    ]
    padding = torch.tensor([[False, True, False, False], [True] * 4])
    assert torch.autograd.gradcheck(
        lambda *parts: narrow_attention(*parts, padding if padded else None, SCALE),
        tensors,
    )


@widths
@pytest.mark.parametrize("spread", [5.0, 30.0, 300.0])
def test_huge_scores_neither_overflow_nor_vanish(width: int, spread: float) -> None:
    # The keys' bounding box reaches farther than they do: with its corner in place
    # of the largest score all others would vanish.
    tensors = inputs(0, width=width, spread=spread)
    expected, _ = oracle(tensors, None, torch.ones(3, 4, 5, width))
    out = narrow_attention(*tensors, None, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


def test_padding_amid_the_keys_outweighs_none_of_them() -> None:
    # The middle of these keys' range, where padding is put, scores more than they do.
    key = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 0.9], [9, 9, 9]])
    value = torch.arange(12.0).view(4, 3)
    query = torch.tensor([[300.0, 300, 300], [900, 900, 900], [0.1, 0, 0]])
    tensors = [part[None, None].contiguous() for part in (query, key, value)]
    padding = torch.tensor([[False, False, False, True]])
    gradient = torch.tensor([[1.0, 2, 3], [3, 1, 2], [2, 3, 1]])[None, None]
    expected, expected_gradients = oracle(tensors, padding, gradient)
    ours = [part.requires_grad_() for part in tensors]
    out = narrow_attention(*ours, padding, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(out, ours, gradient)
    for result, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=1e-3, atol=1e-2)


@widths
def test_an_empty_set_gives_zero_and_no_gradient(width: int) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(0, width=width)]
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1] = True
    out = narrow_attention(*tensors, padding, SCALE)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert (gradient[1] == 0).all()
        assert gradient.isfinite().all()


@widths
def test_chunking_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    tensors = inputs(0, width=width, batch=9)
    whole = narrow_attention(*tensors, None, SCALE)
    monkeypatch.setattr(kernel, "CHUNK", 60)
    torch.testing.assert_close(narrow_attention(*tensors, None, SCALE), whole)


@pytest.mark.parametrize("width", [1, 2, WIDEST, WIDEST + 1])
def test_narrow_attention_is_used_up_to_the_widest_head(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    calls = []

    def spy(*arguments: object) -> Tensor:
        calls.append(arguments)
        return narrow_attention(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "narrow_attention", spy)
    module = MultiHeadAttention(4 * width, 4)
    x = torch.randn(2, 5, 4 * width, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        module(x, x)
    assert not calls
    mask = torch.full((2, 5), False)
    out = module(x, x)
    assert bool(calls) == (width <= WIDEST)
    # A mask that hides nothing takes torch's own path where that is used.
    torch.testing.assert_close(out, module(x, x, mask))
