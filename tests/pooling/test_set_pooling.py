"""Set-learning heads against values computed by hand or by torch."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.samples import DIM, NUM_TOKENS, in_torchs_order, make_head, random_set
from marl_pool.pooling import make_pooling, pooling_names
from marl_pool.pooling.attention import HopfieldPooling, PMAPooling
from marl_pool.pooling.basic import PowerMeanPooling, SoftmaxPooling
from marl_pool.pooling.multi import MultiPooling
from marl_pool.pooling.recurrent import LSTMPooling
from marl_pool.pooling.slots import LearnedAggregationPooling
from marl_pool.utils.errors import UnfitTokensError

X = torch.tensor([[[1.0, -4.0], [3.0, 0.0], [5.0, 1.0]]], dtype=torch.float64)
AVERAGE, MAXIMUM = X.mean(1), X.amax(1)
HIDDEN = torch.tensor([[False, False, True]])


def pool(name: str, x: Tensor = X, padding: Tensor | None = None, **o: Any) -> Tensor:
    return make_pooling(name, dim=x.shape[-1], **o).double()(x, padding)


def test_sum_by_hand():
    assert pool("sum").tolist() == [[9.0, -3.0]]
    assert pool("sum", padding=HIDDEN).tolist() == [[4.0, -4.0]]


# Means between average and maximum


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", ["power", "softmax"])
def test_the_largest_exponents_give_the_maximum(name, learn):
    key = {"power": "p", "softmax": "beta"}[name]
    head = make_pooling(name, dim=4, learn=learn, **{key: 1e30})
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(head(x), x.amax(1))


@pytest.mark.parametrize("name", ["power", "softmax"])
def test_power_and_softmax_range_from_average_to_maximum(name):
    key = {"power": "p", "softmax": "beta"}[name]
    ends = {"power": (1.0, 1e4), "softmax": (0.0, 1e4)}[name]
    low, high = (pool(name, learn=False, **{key: end}) for end in ends)
    torch.testing.assert_close(low, AVERAGE, atol=1e-5, rtol=0)
    torch.testing.assert_close(high, MAXIMUM, atol=2e-3, rtol=0)
    between = pool(name)
    assert (between > AVERAGE).all()
    assert (between < MAXIMUM).all()


def test_a_power_mean_by_hand():
    # Above the smallest: 0, 2, 4 and 0, 4, 5; squares 20 / 3 and 41 / 3.
    expected = [1 + (20 / 3) ** 0.5, -4 + (41 / 3) ** 0.5]
    assert pool("power", p=2.0, learn=False)[0].tolist() == pytest.approx(expected)


def test_a_power_mean_of_negative_features_ignores_padding():
    """A padded slot is zero, far above negative features: its power must not count."""
    x = torch.tensor([[[-1.0], [0.0]]])
    padding = torch.tensor([[False, True]])
    for p in (3.0, 8.0, 10.0, 1e4):
        assert make_pooling("power", dim=1, p=p, learn=False)(x, padding).item() == -1


@settings(max_examples=200)
@given(
    features=st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=6),
    hidden=st.integers(0, 3),
    p=st.floats(1.001, 60.0),
    shift=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_a_power_mean_is_its_formula_and_finite(features, hidden, p, shift, dtype):
    """In float64 and without padding the formula needs no care."""
    x = torch.tensor(features).to(dtype)
    exact = x.double() if shift else x.double().clamp(min=1e-6)
    least = exact.min() if shift else 0.0
    unit = (exact - least).max().clamp(min=1e-300)  # no power may vanish
    expected = least + unit * ((exact - least) / unit).pow(p).mean().pow(1 / p)
    slots = torch.cat([x, torch.full((hidden,), torch.nan, dtype=dtype)])
    slots = slots[None, :, None].requires_grad_()
    padding = (torch.arange(len(x) + hidden) >= len(x))[None]
    head = make_pooling("power", dim=1, p=p, shift=shift).to(dtype)
    with torch.no_grad():  # p itself in float32, whatever the features' dtype
        head.float()
        head.log_above_one.copy_(torch.tensor(p - 1.0).log())
    output = head(slots, padding)
    assert output.dtype == dtype
    size = float(exact.abs().max()) + 1e-4
    close = 10 * torch.finfo(dtype).eps * size + 2e-5 * size + 1e-7
    assert abs(output.item() - expected.item()) <= close
    output.sum().backward()
    for tensor in (slots, *head.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@given(size=st.floats(-30, 37), p=st.floats(1.001, 100.0))
def test_no_size_of_features_is_too_large_or_too_small(size, p):
    x = (10**size * X.float()).requires_grad_()
    output = make_pooling("power", dim=2, p=p)(x)
    assert output.isfinite().all()
    assert (output >= x.amin(1)).all()
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    unit = make_pooling("power", dim=2, p=p)(X.float())
    torch.testing.assert_close(output / 10**size, unit, rtol=1e-4, atol=1e-4)


def test_a_power_mean_of_features_that_are_all_the_same():
    x = torch.full((1, 3, 1), -5.0, requires_grad=True)
    head = make_pooling("power", dim=1, p=8.0)
    output = head(x)
    assert output.item() == -5
    output.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / 3))
    assert all(part.grad.isfinite().all() for part in head.parameters())


def test_the_published_gem_of_features_that_are_not_negative():
    x = X.abs()
    gem = (x**3).mean(1) ** (1 / 3)
    torch.testing.assert_close(pool("power", x, shift=False), gem, atol=1e-6, rtol=0)


def test_a_softmax_mean_by_hand():
    weights = (2 * X).softmax(1)
    expected = (weights * X).sum(1)
    torch.testing.assert_close(pool("softmax", beta=2.0), expected, rtol=1e-6, atol=0)


def test_a_learned_number_starts_at_its_option():
    assert PowerMeanPooling(4, p=2.5).p.item() == pytest.approx(2.5)
    assert SoftmaxPooling(4, beta=0.3).beta.tolist() == pytest.approx([0.3] * 4)


# Attention


def test_gated_attention_by_hand():
    head = make_head("gated")
    x = random_set()[0]
    content, gate = head.content(x).tanh(), head.gate(x).sigmoid()  # type: ignore[operator]
    weights = (content * gate @ head.score.weight.T).softmax(1)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(head(x), (weights * x).sum(1))


def test_pma_is_torchs_attention():
    """Both have the same weights, and scale by the head width as torch does."""
    head = make_head("pma", num_seeds=2, num_heads=4, attention_scale="head")
    assert isinstance(head, PMAPooling)
    attention = head.block.attention
    torch_attention = nn.MultiheadAttention(DIM, 4, bias=False, batch_first=True)
    torch_attention = torch_attention.double()
    with torch.no_grad():
        parts = (attention.to_query, attention.to_key, attention.to_value)
        stacked = torch.cat([part.weight for part in parts])
        torch_attention.in_proj_weight.copy_(stacked)
        torch_attention.out_proj.weight.copy_(attention.to_out.weight)
    x, padding, _ = random_set()
    seeds = head.learned_query.expand(len(x), -1, -1)
    stored = head.feedforward(x.masked_fill(padding[..., None], 0))
    mixed = torch_attention(seeds, stored, stored, key_padding_mask=padding)[0]
    first, second = head.block.norms
    hidden = first(seeds + mixed)
    expected = second(hidden + head.block.feedforward(hidden)).flatten(1)
    torch.testing.assert_close(head(x, padding), expected)


def test_a_cold_hopfield_network_retrieves_one_vector():
    head = HopfieldPooling(DIM, beta=1e4, num_updates=2).double()
    x, padding, _ = random_set()
    weights = head.weights(x, padding)
    assert (weights.amax(-1) > 1 - 1e-6).all()
    hot = HopfieldPooling(DIM, beta=1e-9).double().weights(x, padding)
    even = (~padding).double() / (~padding).sum(1, keepdim=True)
    torch.testing.assert_close(hot[:, 0], even, atol=1e-6, rtol=0)


def test_updates_lower_the_energy_of_a_hopfield_network():
    """Ramsauer et al., theorem 1: -lse(β, ξKᵀ) + |ξ|² / 2 never rises."""
    x = random_set()[0]
    head = HopfieldPooling(DIM, beta=1.0).double()
    keys = head.to_key(head.norm_stored(x))[:, None]
    state = head.to_query(head.norm_state(head.learned_query)).expand(len(x), 1, 1, -1)

    def energy(state: Tensor) -> Tensor:
        scores = state @ keys.transpose(-1, -2)
        return -scores.logsumexp(-1) + state.square().sum(-1) / 2

    for _ in range(4):
        after = head._attend(state, keys, None) @ keys
        assert (energy(after) <= energy(state) + 1e-9).all()
        state = after
    last = HopfieldPooling(DIM, beta=1.0, num_updates=4).double()
    last.load_state_dict(head.state_dict())
    torch.testing.assert_close(
        last.weights(x), head._attend(state, keys, None)[:, :, 0]
    )


# Heads that depend on the order of tokens


def test_learned_aggregation_is_that_of_the_blog_post():
    head = make_head("learned_aggregation", query_dim=3, dim_out=2)
    assert isinstance(head, LearnedAggregationPooling)
    x = random_set()[0]
    for row, output in zip(x, head(x), strict=True):
        query = head.learned_query[None] @ head.to_query.weight.T
        scores = query @ (row.T @ head.to_key.weight.T) / DIM**0.5
        expected = scores.softmax(-1) @ (row.T @ head.to_value.weight.T)
        torch.testing.assert_close(output, expected[0])
    assert head(x[:1]).shape == (1, 2)


@pytest.mark.parametrize("name", ["learned_aggregation", "flatten"])
def test_more_tokens_than_slots_are_refused(name):
    head = make_head(name)
    x = random_set(num_tokens=NUM_TOKENS + 1)[0]
    with pytest.raises(UnfitTokensError, match=r"at most 5 tokens, got 6"):
        head(x)


def test_lstm_is_torchs_lstm():
    head = make_head("lstm", hidden=3)
    assert isinstance(head, LSTMPooling)
    oracle = nn.LSTM(DIM, 3, batch_first=True).double()
    with torch.no_grad():
        oracle.weight_ih_l0.copy_(in_torchs_order(head.on_input.weight))
        oracle.weight_hh_l0.copy_(in_torchs_order(head.on_state.weight))
        oracle.bias_ih_l0.copy_(in_torchs_order(head.on_input.bias))
        oracle.bias_hh_l0.zero_()
    x = random_set()[0]
    torch.testing.assert_close(head(x), oracle(x)[0][:, -1])


# Merging


def test_similar_tokens_merge_first_and_count_once():
    common = torch.tensor([1.0, 0.0]).double()
    rare = torch.tensor([0.0, 3.0]).double()
    x = torch.stack([common, rare, common, common, common])[None]
    assert pool("merge", x).tolist() == [[0.5, 1.5]]
    assert pool("avg", x).tolist() == [pytest.approx([0.8, 0.6])]


def test_merging_by_hand():
    # Angles 0, 10, 50 and 180 degrees: (0, 10), their mean with 50, then the last.
    angles = torch.tensor([50.0, 0.0, 180.0, 10.0]).double().deg2rad()
    x = torch.stack([angles.cos(), angles.sin()], -1)[None]
    fifty, zero, last, ten = x[0]
    expected = (((zero + ten) / 2 + fifty) / 2 + last) / 2
    torch.testing.assert_close(pool("merge", x)[0], expected)


def test_content_decides_between_equally_similar_pairs():
    """Of three orthogonal vectors, the two that sort first merge first."""
    head = make_pooling("merge", dim=3)
    for order in itertools.permutations(range(3)):
        output = head(torch.eye(3)[None, list(order)])
        assert output.tolist() == [[0.5, 0.25, 0.25]]


@given(
    rows=st.lists(
        st.lists(st.integers(-1, 1), min_size=3, max_size=3), min_size=2, max_size=6
    ),
    order=st.randoms(use_true_random=False),
    hidden=st.integers(0, 2),
)
def test_ties_do_not_make_merging_depend_on_the_order(rows, order, hidden):
    """Few different numbers, so that nearly all pairs tie with others; to the bit."""
    head = make_pooling("merge", dim=3)
    padding = torch.arange(len(rows) + hidden)[None] >= len(rows)
    x = torch.tensor([*rows, *[[7, 7, 7]] * hidden]).float()[None]
    places = list(range(len(rows) + hidden))
    order.shuffle(places)
    assert torch.equal(head(x[:, places], padding[:, places]), head(x, padding))


@pytest.mark.parametrize("seed", range(20))
def test_merging_copies_does_not_depend_on_the_order(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, 7, DIM, generator=generator).double()
    rows[:, 4], rows[:, 5] = rows[:, 1], rows[:, 1]
    shuffled = rows[:, torch.randperm(7, generator=generator)]
    assert not shuffled.equal(rows)
    head = make_head("merge")
    torch.testing.assert_close(head(shuffled), head(rows))


@pytest.mark.parametrize("name", pooling_names())
def test_padding_works_under_autocast(name):
    head = make_head(name).float()
    x, padding, types = random_set()
    with torch.autocast("cpu", torch.bfloat16):
        pooled = head(x.float(), padding, types)
    assert pooled.isfinite().all()
    exact = head(x.float(), padding, types)
    torch.testing.assert_close(pooled.float(), exact, rtol=0.1, atol=0.1)


# Several heads


def test_outputs_of_several_heads_are_concatenated():
    parts: list[dict[str, Any]] = [
        {"name": "avg"},
        {"name": "ada", "num_heads": 2, "query": "mean"},
        {"name": "max"},
    ]
    head = make_head("multi", heads=parts)
    assert isinstance(head, MultiPooling)
    x, padding, types = random_set()
    alone = [part(x, padding, types) for part in head.heads]
    assert torch.equal(head(x, padding, types), torch.cat(alone, -1))
    assert head.dim_out == 3 * DIM
    assert head.weights(x, padding, types) is None


def test_each_head_gets_its_own_extra_token():
    parts = [{"name": "cls"}, {"name": "avg"}, {"name": "cls"}]
    head = make_head("multi", heads=parts)
    x, padding, types = random_set()
    with_tokens = head.prepend(x, padding, types)
    assert with_tokens[0].shape[1] == NUM_TOKENS + 2 == head.extra_tokens + NUM_TOKENS
    first, average, last = head(*with_tokens).split(DIM, -1)
    assert isinstance(head, MultiPooling)
    tokens = [part.tokens for part in head.heads if part.extra_tokens]
    for result, token in zip((first, last), tokens, strict=True):
        torch.testing.assert_close(result, token.expand_as(result))
    avg = make_pooling("avg", dim=DIM)(x, padding)
    torch.testing.assert_close(average, avg)


def test_weights_of_several_heads_are_stacked():
    parts: list[dict[str, Any]] = [
        {"name": "ada", "num_heads": 2, "query": "mean"},
        {"name": "avg"},
    ]
    head = make_head("multi", heads=parts)
    x, padding, types = random_set()
    weights = head.weights(x, padding, types)
    assert weights is not None
    assert weights.shape == (len(x), 3, NUM_TOKENS)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(x), 3).double())
