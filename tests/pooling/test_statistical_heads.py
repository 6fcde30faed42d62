"""Statistical heads and Set2Set against torch, scipy and published formulas."""

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from helpers.samples import DIM, in_torchs_order, make_head, random_set
from marl_pool.pooling import make_pooling

SIZES = [1, 2, 3, 7, 12]
LEVELS = (0.0, 0.1, 0.5, 0.93, 1.0)


def random_tokens(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, DIM, generator=generator, dtype=torch.float64)


def pool(name: str, tokens: Tensor, **options: Any) -> Tensor:
    """Pool one set, followed by two padded slots."""
    head = make_pooling(name, dim=tokens.shape[1], **options).to(tokens.dtype)
    x = torch.cat([tokens, torch.full_like(tokens[:1], torch.nan).expand(2, -1)])
    return head(x[None], torch.arange(len(x))[None] >= len(tokens))[0]


@pytest.mark.parametrize("size", SIZES)
def test_quantiles_are_those_of_torch(size):
    x = random_tokens(size)
    expected = torch.quantile(x, torch.tensor(LEVELS, dtype=x.dtype), dim=0)
    torch.testing.assert_close(pool("quantile", x, levels=LEVELS), expected.flatten())
    torch.testing.assert_close(pool("quantile", x), x.quantile(0.5, dim=0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.49])
def test_a_trimmed_mean_is_that_of_scipy(size, fraction):
    x = random_tokens(size)
    expected = torch.as_tensor(scipy.stats.trim_mean(x.numpy(), fraction, axis=0))
    torch.testing.assert_close(pool("trimmed", x, fraction=fraction), expected)


@pytest.mark.parametrize("size", SIZES)
def test_sum_over_root_and_deviation(size):
    x = random_tokens(size)
    torch.testing.assert_close(pool("sqrtn", x), x.sum(0) / math.sqrt(size))
    variance = x.var(0, unbiased=False)
    torch.testing.assert_close(pool("std", x), (variance + 1e-5).sqrt())


def test_equal_tokens_have_a_finite_gradient():
    for name in ("std", "pna", "quantile", "trimmed"):
        options = {"num_tokens": 4} if name == "pna" else {}
        x = torch.ones(2, 4, 3, requires_grad=True)
        make_pooling(name, dim=3, **options)(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_pna_is_its_tensor_product(size):
    x = random_tokens(size)
    delta = 1.7
    std = (x.square().mean(0) - x.mean(0).square() + 1e-5).sqrt()
    statistics = torch.cat([x.mean(0), x.amax(0), x.amin(0), std])
    size_log = math.log(size + 1)
    scalers = torch.tensor([1, size_log / delta, delta / size_log], dtype=x.dtype)
    expected = torch.outer(scalers, statistics).flatten()
    torch.testing.assert_close(pool("pna", x, avg_log_size=delta), expected)


def test_pna_takes_its_default_size_from_the_slots():
    x = random_tokens(4)
    whole = make_pooling("pna", dim=DIM, num_tokens=4).double()(x[None])[0]
    torch.testing.assert_close(*whole.chunk(3)[:2])
    torch.testing.assert_close(*whole.chunk(3)[1:])


def test_pna_keeps_its_default_size_with_its_weights():
    head, larger = (make_pooling("pna", dim=DIM, num_tokens=n) for n in (4, 9))
    x = random_tokens(7).float()[None]
    larger.load_state_dict({})  # weights of an earlier revision
    assert not torch.equal(larger(x), head(x))
    larger.load_state_dict(head.state_dict())
    assert torch.equal(larger(x), head(x))
    assert not make_pooling("pna", dim=DIM, avg_log_size=1.7).state_dict()


@pytest.mark.parametrize(("name", "outliers"), [("quantile", 4), ("trimmed", 2)])
def test_outliers_leave_the_result_in_the_range_of_the_others(name, outliers):
    x = random_tokens(9)
    inliers = x[outliers:]
    for extreme in (-1e9, 1e9):
        x[:outliers] = extreme
        output = pool(name, x)
        assert (output >= inliers.amin(0)).all()
        assert (output <= inliers.amax(0)).all()


def test_set2set_is_that_of_the_paper_with_torchs_lstm():
    head: Any = make_head("set2set", steps=3)
    lstm: Any = nn.LSTM(2 * DIM, DIM).double()
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(in_torchs_order(head.on_input.weight))
        lstm.weight_hh_l0.copy_(in_torchs_order(head.on_state.weight))
        lstm.bias_ih_l0.copy_(in_torchs_order(head.on_input.bias))
        lstm.bias_hh_l0.zero_()
    x = random_set()[0]
    result, state = x.new_zeros(len(x), 2 * DIM), None
    for _ in range(3):
        output, state = lstm(result[None], state)
        weights = torch.einsum("bnd,bd->bn", x, output[0]).softmax(1)
        read = torch.einsum("bn,bnd->bd", weights, x)
        result = torch.cat([output[0], read], 1)
    torch.testing.assert_close(head(x), result)
    torch.testing.assert_close(head.weights(x)[:, 0], weights)
    torch.testing.assert_close(head.logits(x).softmax(2), head.weights(x))
