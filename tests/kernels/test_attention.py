"""Attention, against torch's and against the formula."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.samples import DIM, random_set
from marl_pool.kernels.attention import MultiHeadAttention
from marl_pool.utils.errors import InputError

heads_and_scales = pytest.mark.parametrize(
    ("num_heads", "scale"),
    [(1, "model"), (1, "head"), (4, "model"), (4, "head"), (8, "model"), (8, "head")],
)


def make(num_heads: int = 2, dim: int = DIM, **options: Any) -> MultiHeadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = MultiHeadAttention(dim, num_heads, **options)
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=0.5)
    return attention.double()


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Three queries, five context vectors and their padding."""
    context, padding, _ = random_set(seed)
    return random_set(seed + 1, num_tokens=3)[0], context, padding


def by_formula(
    attention: MultiHeadAttention,
    query: Tensor,
    context: Tensor,
    padding: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output and weights by the definition of softmax, head by head."""
    q, k, v = (
        part(x)
        for part, x in (
            (attention.to_query, query),
            (attention.to_key, context),
            (attention.to_value, context),
        )
    )
    width = DIM // attention.num_heads
    outputs, weights = [], []
    for columns in torch.arange(DIM).split(width):
        scores = torch.einsum("bmd,bnd->bmn", q[..., columns], k[..., columns]) * scale
        powers = scores.exp() * ~padding[:, None]
        share = powers / powers.sum(-1, keepdim=True)
        outputs.append(torch.einsum("bmn,bnd->bmd", share, v[..., columns]))
        weights.append(share)
    return attention.to_out(torch.cat(outputs, -1)), torch.stack(weights, 1)


@pytest.mark.parametrize("bias", [False, True])
@heads_and_scales
def test_output_matches_the_formula(num_heads: int, scale: Any, bias: bool) -> None:
    attention = make(num_heads, scale=scale, bias=bias)
    query, context, padding = inputs()
    divisor = math.sqrt(DIM if scale == "model" else DIM // num_heads)
    output, weights = by_formula(attention, query, context, padding, 1 / divisor)
    torch.testing.assert_close(attention(query, context, padding), output)
    torch.testing.assert_close(attention.weights(query, context, padding), weights)
    nothing = torch.zeros_like(padding)
    output, weights = by_formula(attention, query, context, nothing, 1 / divisor)
    torch.testing.assert_close(attention(query, context), output)
    torch.testing.assert_close(attention.weights(query, context), weights)


@pytest.mark.parametrize("num_heads", [1, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_set_that_attends_to_itself(num_heads: int, bias: bool) -> None:
    attention = make(num_heads, bias=bias)
    x, padding, _ = random_set()
    gradients = []
    for context in (x, x.clone()):  # one product for all projections, or three
        attention.zero_grad()
        attention(x, context, padding).square().sum().backward()
        gradients.append([part.grad for part in attention.parameters()])
        torch.testing.assert_close(
            attention(x, context, padding), attention(x, x, padding)
        )
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_scaled_by_head_width_matches_torch(num_heads: int) -> None:
    attention = make(num_heads, scale="head", bias=True)
    oracle = nn.MultiheadAttention(DIM, num_heads, batch_first=True).double()
    parts = (attention.to_query, attention.to_key, attention.to_value)
    oracle.load_state_dict(
        {
            "in_proj_weight": torch.cat([part.weight for part in parts]),
            "in_proj_bias": torch.cat([part.bias for part in parts]),
            "out_proj.weight": attention.to_out.weight,
            "out_proj.bias": attention.to_out.bias,
        }
    )
    query, context, padding = inputs()
    for mask in (None, padding):
        output, weights = oracle(
            query, context, context, key_padding_mask=mask, average_attn_weights=False
        )
        torch.testing.assert_close(attention(query, context, mask), output)
        torch.testing.assert_close(attention.weights(query, context, mask), weights)


@pytest.mark.parametrize("num_heads", [2, 8])
@given(seed=st.integers(0, 2**31), content=st.sampled_from([1e6, -1e6, 0.0]))
def test_what_lies_under_padding_never_matters(
    num_heads: int, seed: int, content: float
) -> None:
    attention = make(num_heads)
    query, context, padding = inputs(seed)
    expected = attention(query, context, padding)
    changed = context.masked_fill(padding[..., None], content).requires_grad_()
    result = attention(query, changed, padding)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    result.sum().backward()
    assert changed.grad is not None
    assert not changed.grad[padding].any()
    weights = attention.weights(query, context, padding)
    torch.testing.assert_close(attention.weights(query, changed, padding), weights)


@pytest.mark.parametrize("num_heads", [2, 8])
def test_only_unpadded_key_gets_all_attention(num_heads: int) -> None:
    attention = make(num_heads)
    query, context, _ = inputs()
    padding = torch.arange(5).expand(4, 5) != 2
    expected = attention.to_out(attention.to_value(context[:, 2:3])).expand(-1, 3, -1)
    torch.testing.assert_close(attention(query, context, padding), expected)


@pytest.mark.parametrize("num_heads", [2, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_without_keys_gives_a_zero_mixture(num_heads: int, bias: bool) -> None:
    attention = make(num_heads, bias=bias)
    query, context, padding = inputs()
    padding[1] = True
    for part in (query, context):
        part.requires_grad_()
    result = attention(query, context, padding)
    zero = attention.to_out(torch.zeros_like(result[1]))
    torch.testing.assert_close(result[1], zero)
    torch.testing.assert_close(
        result[2:], attention(query[2:], context[2:], padding[2:])
    )
    result.square().sum().backward()
    for tensor in (query, context, *attention.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert context.grad is not None
    assert not context.grad[1].any()
    weights = attention.weights(query, context, padding)
    assert not weights[1].any()
    assert weights.isfinite().all()


@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_scores_may_be_huge(num_heads: int) -> None:
    attention = make(num_heads)
    query, context, padding = inputs()
    query = (1e200 * query).requires_grad_()
    for mask in (None, padding):
        output = attention(query, context, mask)
        weights = attention.weights(query, context, mask)
        assert weights.isfinite().all()
        # The largest score takes all the weight, so each output is a single value.
        values = attention.to_value(context).unflatten(-1, (num_heads, -1))
        mixed = (weights @ values.transpose(1, 2)).transpose(1, 2).flatten(2)
        torch.testing.assert_close(output, attention.to_out(mixed))
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.isfinite().all()


def test_bias_is_of_all_projections_or_none() -> None:
    assert sum(p.numel() for p in make(bias=False).parameters()) == 4 * DIM**2
    assert sum(p.numel() for p in make(bias=True).parameters()) == 4 * (DIM**2 + DIM)


@pytest.mark.parametrize("num_heads", [0, -1, 3, 16])
def test_heads_must_divide_the_width(num_heads: int) -> None:
    message = f"num_heads: expected a divisor of dim = 8, got {num_heads}"
    with pytest.raises(InputError, match=message):
        MultiHeadAttention(DIM, num_heads)


def test_an_unknown_scale_lists_the_choices() -> None:
    scale: Any = "width"
    with pytest.raises(InputError, match="expected 'model' or 'head', got 'width'"):
        MultiHeadAttention(DIM, scale=scale)
