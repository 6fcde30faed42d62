"""The corollaries of the AdaPool paper: average and maximum as special cases."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.samples import DIM, random_set
from marl_pool.pooling import make_pooling

seeds = st.integers(0, 2**31)
signs = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=DIM, max_size=DIM)


def set_to(linear: nn.Linear, weight: Tensor) -> None:
    with torch.no_grad():
        linear.weight.copy_(weight)


def plain_ada(sharpness: float, **options: Any) -> Any:
    """AdaPool with W_Q = sharpness · I, W_K = W_V = W_O = I, no residual, no bias."""
    head: Any = make_pooling("ada", dim=DIM, residual=False, **options).double()
    for part in ("to_key", "to_value", "to_out"):
        set_to(getattr(head.attention, part), torch.eye(DIM))
    set_to(head.attention.to_query, sharpness * torch.eye(DIM))
    assert not any("bias" in name for name, _ in head.named_parameters())
    return head


# Corollary 3.10: the average


@given(seed=seeds, num_heads=st.sampled_from([1, 2, 4, 8]))
@pytest.mark.parametrize("query", ["self", "mean", "learned", [0]])
def test_a_query_that_is_ignored_averages(query, seed, num_heads):
    head = plain_ada(0.0, query=query, num_heads=num_heads)
    x, padding, types = random_set(seed)
    set_to(head.attention.to_key, x[0].T @ x[0])
    for mask in (None, padding):
        average = make_pooling("avg", dim=DIM)(x, mask)
        torch.testing.assert_close(head(x, mask, types), average, rtol=0, atol=1e-15)


def test_a_query_that_is_ignored_has_the_gradient_of_the_average():
    gradients = []
    for head in (plain_ada(0.0, query="learned"), make_pooling("avg", dim=DIM)):
        x, padding, types = random_set()
        head(x.requires_grad_(), padding, types).pow(3).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


# Corollary 3.11: the maximum, where the query is positive


def extremes(x: Tensor, padding: Tensor, sign: Tensor) -> Tensor:
    """Return each feature's maximum, minimum or mean, by the sign of the query."""
    largest = make_pooling("max", dim=DIM)(x, padding)
    least = -make_pooling("max", dim=DIM)(-x, padding)
    average = make_pooling("avg", dim=DIM)(x, padding)
    return torch.where(sign > 0, largest, torch.where(sign < 0, least, average))


@given(seed=seeds, sign=signs)
def test_a_growing_query_finds_the_maximum_minimum_or_mean(seed, sign):
    x, padding, _ = random_set(seed)
    query = torch.tensor(sign, dtype=torch.float64) * torch.linspace(0.5, 2, DIM)
    expected = extremes(x, padding, query)
    for sharpness in (1e2, 1e4, 1e6):
        head = plain_ada(sharpness, query="learned", num_heads=DIM)
        with torch.no_grad():
            head.learned_query.copy_(query)
        # Σ gap · exp(−s · gap) is at most N / (e · s), whatever the gaps are.
        slope = sharpness * 0.5 / math.sqrt(DIM)
        bound = x.shape[1] / (math.e * slope) + 1e-12
        assert (head(x, padding) - expected).abs().max() <= bound


@pytest.mark.parametrize("query", ["self", "mean", [0]])
def test_queries_from_tokens_find_them_by_their_signs(query):
    x, padding, types = random_set()
    x[:, :, 0] = 0  # every query is 0 in this feature
    padding[:, 0], types[:, 0] = False, 0
    head = plain_ada(1e9, query=query, num_heads=DIM)
    queries = head._query(x, padding, types)
    assert (queries[:, 0] == 0).all()
    assert (queries[:, 1:] > 0.01).any()
    assert (queries[:, 1:] < -0.01).any()
    expected = extremes(x, padding, queries)
    torch.testing.assert_close(head(x, padding, types), expected, rtol=0, atol=1e-6)


def test_one_head_for_each_feature_is_needed():
    x, padding, _ = random_set()
    head = plain_ada(1e9, query="learned", num_heads=1)
    with torch.no_grad():
        head.learned_query.fill_(1)
    largest = make_pooling("max", dim=DIM)(x, padding)
    assert not torch.allclose(head(x, padding), largest, atol=1e-2)


# Equations 4 and 5: the maximum itself


@given(seed=seeds, ties=st.integers(1, 4))
def test_tokens_that_tie_share_the_maximum_and_its_gradient(seed, ties):
    x, padding, _ = random_set(seed)
    padding[:, :4], padding[:, 4] = False, True
    x = x.clamp(-5, 5)
    x[:, :ties], x[:, 4] = 9.0, 9.0  # the last one, under padding, does not tie
    expected = torch.zeros_like(x)
    expected[:, :ties] = 1 / ties
    for part, mask in ((x, padding), (x[:, :4], None)):
        leaf = part.clone().requires_grad_()
        pooled = make_pooling("max", dim=DIM)(leaf, mask)
        assert (pooled == 9).all()
        pooled.sum().backward()
        torch.testing.assert_close(leaf.grad, expected[:, : part.shape[1]])
