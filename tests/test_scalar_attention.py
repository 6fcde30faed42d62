"""Attention with heads of width one, against torch's own in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from marl_pool import scalar_attention as room
from marl_pool.scalar_attention import scalar_attention

SCALE = 1 / math.sqrt(8)


def inputs(seed, batch=3, heads=4, queries=5, keys=7, spread=1.0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, spread), (keys, spread), (keys, 1.0)]
    return [
        torch.randn(batch, heads, count, 1, generator=generator) * width + offset
        for count, width in shapes
    ]


def oracle(tensors, padding, gradient):
    doubles = [tensor.double().requires_grad_() for tensor in tensors]
    keep = None if padding is None else ~padding[:, None, None, :]
    out = F.scaled_dot_product_attention(*doubles, attn_mask=keep, scale=SCALE)
    return out.detach(), torch.autograd.grad(out, doubles, gradient.double())


@given(
    seed=st.integers(0, 1000),
    queries=st.sampled_from([1, 5, 32]),
    keys=st.sampled_from([1, 7, 32, 50]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    offset=st.sampled_from([0.0, 5.0]),
    padded=st.booleans(),
)
def test_results_and_gradients_are_torchs(seed, queries, keys, spread, offset, padded):
    tensors = inputs(seed, queries=queries, keys=keys, spread=spread, offset=offset)
    padding = None
    if padded:
        padding = (
            torch.rand(3, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
        )
        padding[:, -1] = False
    gradient = torch.randn(3, 4, queries, 1, generator=torch.Generator().manual_seed(1))
    expected, expected_gradients = oracle(tensors, padding, gradient)
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    out = scalar_attention(*ours, padding, SCALE)
    gradients = torch.autograd.grad(out, ours, gradient)
    close = {"rtol": 1e-4, "atol": 1e-4 * (1 + spread)}
    torch.testing.assert_close(out.double(), expected, **close)
    for ours_, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours_.double(), theirs, **close)
    with torch.no_grad():
        torch.testing.assert_close(scalar_attention(*ours, padding, SCALE), out)


@pytest.mark.parametrize("limit", [room.LIMIT, -1.0], ids=["as they are", "shifted"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck_on_both_roads(monkeypatch, limit, padded):
    monkeypatch.setattr(room, "LIMIT", limit)
    tensors = [t.double().requires_grad_() for t in inputs(0, batch=2, keys=4)]
    padding = torch.tensor([[False, True, False, False], [True] * 4])
    assert torch.autograd.gradcheck(
        lambda *parts: scalar_attention(*parts, padding if padded else None, SCALE),
        tensors,
    )


def test_huge_scores_neither_overflow_nor_vanish():
    tensors = inputs(0, spread=300.0)
    expected, _ = oracle(tensors, None, torch.ones(3, 4, 5, 1))
    out = scalar_attention(*tensors, None, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


def test_an_empty_set_gives_zero_and_no_gradient():
    tensors = [tensor.requires_grad_() for tensor in inputs(0)]
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1] = True
    out = scalar_attention(*tensors, padding, SCALE)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert (gradient[1] == 0).all()
        assert gradient.isfinite().all()


def test_pieces_do_not_show(monkeypatch):
    tensors = inputs(0, batch=9)
    whole = scalar_attention(*tensors, None, SCALE)
    monkeypatch.setattr(room, "PIECE", 60)
    torch.testing.assert_close(scalar_attention(*tensors, None, SCALE), whole)
