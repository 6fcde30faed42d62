"""Theory: bounds that hold for all scores, losses against formulas by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.special import softmax
from torch import Tensor, nn

from helpers.samples import DIM, NUM_TOKENS, heads, make_head, random_set
from marl_pool.pooling import make_pooling
from marl_pool_studies.adapool.diagnosis import theory
from marl_pool_studies.adapool.diagnosis.theory import Neighborhoods, WeightBounds

seeds = st.integers(0, 2**31)


@st.composite
def scored_sets(draw: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with ties, of any size, k from 0 to N, N from 1, garbage under padding."""
    slots = draw(st.integers(1, 12))
    numbers = st.one_of(
        st.sampled_from([-2.0, 0.0, 0.0, 1.0, 900.0]),
        st.floats(-40, 40),
        st.floats(-1, 1),
    )
    scores = draw(arrays.arrays(np.float64, slots, elements=numbers))
    signal, padding = (
        draw(arrays.arrays(np.bool_, slots, elements=st.booleans())) for _ in range(2)
    )
    kind = draw(st.sampled_from(["any", "whole", "all signal", "all noise", "tie"]))
    if kind != "any":
        padding[:] = False
    if kind == "tie" and slots > 2:
        # The smallest score of signal is the largest of noise.
        scores[:], signal[:] = 0.0, True
        scores[-1], signal[0] = 1.0, False
    if kind.startswith("all"):
        signal[:] = kind == "all signal"
    padding[draw(st.integers(0, slots - 1))] = False
    scores[padding] = draw(st.sampled_from([0.0, 1e300, -1e300, np.nan]))
    return tuple(torch.from_numpy(part)[None] for part in (scores, signal, padding))


def weights_of(scores: Tensor, padding: Tensor) -> Tensor:
    """The softmax, by scipy, over the tokens present."""
    weights = np.zeros(scores.shape)
    for row, (row_scores, hidden) in enumerate(
        zip(scores.numpy(), padding.numpy(), strict=True)
    ):
        weights[row, ~hidden] = softmax(row_scores[~hidden])
    return torch.from_numpy(weights)


def violations(
    case: tuple[Tensor, Tensor, Tensor],
    change: Callable[[Neighborhoods], Neighborhoods] = lambda neighborhoods: (
        neighborhoods
    ),
    swap: Callable[[WeightBounds], WeightBounds] = lambda bounds: bounds,
) -> int:
    scores, signal, padding = case
    neighborhoods = theory.neighborhoods(scores, signal, padding)
    bounds = swap(theory.weight_bounds(change(neighborhoods)))
    weights = weights_of(scores, padding)
    return int(theory.outside(weights, signal, bounds, padding).sum())


# The bounds


@pytest.fixture(scope="module")
def scored_cases() -> list[tuple[Tensor, Tensor, Tensor]]:
    """600 sets, made once; for each of them the bounds hold as they are printed."""
    cases = []

    @settings(max_examples=600, database=None)
    @given(scored_sets())
    def check_bounds(case: tuple[Tensor, Tensor, Tensor]) -> None:
        cases.append(case)
        assert violations(case) == 0

    check_bounds()
    return cases


def test_the_printed_bounds_hold_for_all_scores(
    scored_cases: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    assert len(scored_cases) >= 600


@pytest.mark.parametrize(
    "condition",
    [
        lambda f: f.margin < -1,
        lambda f: f.margin > 1,
        lambda f: (f.margin == 0) & (f.signal_width > 0),
        lambda f: f.num_signal == 0,
        lambda f: (f.num_signal == f.num_tokens) & (f.num_tokens > 2),
        lambda f: f.num_tokens == 1,
    ],
    ids=["M < 0", "M > 0", "a tie", "k = 0", "k = N", "N = 1"],
)
def test_such_sets_are_among_those_tried(
    condition: Callable[[Neighborhoods], Tensor],
    scored_cases: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    assert any(
        bool(condition(theory.neighborhoods(*case)).all()) for case in scored_cases
    )


WRONG: dict[str, Callable[[WeightBounds], WeightBounds]] = {
    "L_s and U_s": lambda b: b._replace(
        signal_low=b.signal_high, signal_high=b.signal_low
    ),
    "L_eta and U_eta": lambda b: b._replace(
        noise_low=b.noise_high, noise_high=b.noise_low
    ),
    "signal and noise": lambda b: WeightBounds(*b[2:], *b[:2]),
}
MIXED: dict[str, Callable[[Neighborhoods], Neighborhoods]] = {
    "M and D": lambda f: f._replace(margin=f.distance, distance=f.margin),
    "both widths": lambda f: f._replace(
        signal_width=f.noise_width, noise_width=f.signal_width
    ),
    "the sign of M": lambda f: f._replace(margin=f.margin.abs()),
}


@pytest.mark.parametrize("swap", WRONG.values(), ids=WRONG)
def test_swapped_bounds_are_caught(
    swap: Callable[[WeightBounds], WeightBounds],
    scored_cases: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    assert any(violations(case, swap=swap) > 0 for case in scored_cases)


@pytest.mark.parametrize("change", MIXED.values(), ids=MIXED)
def test_bounds_of_mixed_up_neighborhoods_are_caught(
    change: Callable[[Neighborhoods], Neighborhoods],
    scored_cases: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    assert any(violations(case, change) > 0 for case in scored_cases)


def test_a_weight_that_is_nan_is_outside() -> None:
    scores, signal = torch.zeros(1, 3), torch.tensor([[True, False, False]])
    bounds = theory.weight_bounds(theory.neighborhoods(scores, signal))
    weights = torch.tensor([[torch.nan, 1 / 3, 1 / 3]], dtype=torch.float64)
    assert theory.outside(weights, signal, bounds).tolist() == [[True, False, False]]


SCORES = torch.tensor([[3.0, 1.0, 2.0, -1.0, 9.0]])
SIGNAL = torch.tensor([[True, True, False, False, False]])
PADDING = torch.tensor([[False, False, False, False, True]])


def test_neighborhoods_by_hand() -> None:
    neighborhood = theory.neighborhoods(SCORES, SIGNAL, PADDING)
    assert [float(part) for part in neighborhood] == [2, 4, 2, 3, -1, 4]
    assert neighborhood.margin.dtype == torch.float64


def test_bounds_by_hand() -> None:
    """k = 2, N = 4, ε_s = 2, ε_η = 3, M = -1, D = 4 in the formulas as printed."""
    e = np.exp
    bounds = theory.weight_bounds(theory.neighborhoods(SCORES, SIGNAL, PADDING))
    assert [float(part) for part in bounds] == pytest.approx(
        [
            1 / 2 - 1 / (1 + e(-2) + 2 * e(-4)),
            1 / 2 - 1 / (1 + e(2) + 2 * e(1)),
            -1 / (2 * e(-1) + 1 + e(-3)),
            -1 / (2 * e(4) + 1 + e(3)),
        ],
        rel=1e-12,
    )


def test_without_noise_or_signal_the_terms_of_it_are_dropped() -> None:
    all_signal, no_signal = torch.ones_like(SIGNAL), torch.zeros_like(SIGNAL)
    neighborhood = theory.neighborhoods(SCORES, all_signal, PADDING)
    assert neighborhood.signal_width == 4
    assert (
        torch.stack(
            [neighborhood.noise_width, neighborhood.margin, neighborhood.distance]
        )
        .isnan()
        .all()
    )
    bounds = theory.weight_bounds(neighborhood)
    assert float(bounds.signal_low) == pytest.approx(1 / 4 - 1 / (1 + 3 * np.exp(-4)))
    assert float(bounds.signal_high) == pytest.approx(1 / 4 - 1 / (1 + 3 * np.exp(4)))
    assert torch.stack(bounds[2:]).isnan().all()
    neighborhood = theory.neighborhoods(SCORES, no_signal, PADDING)
    assert neighborhood.noise_width == 4
    bounds = theory.weight_bounds(neighborhood)
    assert float(bounds.noise_low) == pytest.approx(-1 / (1 + 3 * np.exp(-4)))
    assert float(bounds.noise_high) == pytest.approx(-1 / (1 + 3 * np.exp(4)))
    assert torch.stack(bounds[:2]).isnan().all()


@given(scored_sets())
def test_the_distance_is_margin_and_widths(case: tuple[Tensor, Tensor, Tensor]) -> None:
    neighborhood = theory.neighborhoods(*case)
    total = neighborhood.margin + neighborhood.signal_width + neighborhood.noise_width
    torch.testing.assert_close(neighborhood.distance, total, equal_nan=True)


def test_far_apart_neighborhoods_squeeze_the_bounds() -> None:
    """Remark 3.13."""
    scores = torch.tensor([[50.0, 50.0, 0.0, 0.0]])
    signal = torch.tensor([[True, True, False, False]])
    bounds = theory.weight_bounds(theory.neighborhoods(scores, signal))
    assert torch.stack(bounds).abs().max() < 1e-12


# Pooling


@heads
def test_weights_are_the_softmax_of_the_logits(
    name: str, options: dict[str, Any]
) -> None:
    head = make_head(name, **options)
    x, padding, types = random_set()
    padding[1] = True
    given_set = head.prepend(x, padding, types)
    logits = head.logits(*given_set)
    assert (logits is not None) == (name in ("ada", "set2set"))
    if logits is not None:
        present = ~padding[:, None].expand_as(logits)
        assert (logits[present].abs() < 1e3).all()
        expected = weights_of(
            logits[2:].detach().flatten(0, 1),
            padding[2:, None].expand_as(logits[2:]).flatten(0, 1),
        )
        weights = head.weights(*given_set)
        assert weights is not None
        torch.testing.assert_close(weights[2:].flatten(0, 1), expected)


@pytest.mark.parametrize("scale", ["model", "head"])
def test_logits_are_scaled_products(scale: str) -> None:
    head = make_head("ada", num_heads=2, attention_scale=scale)
    x, _, types = random_set()
    one_self = (types == 0).sum(1) == 1
    assert one_self.any()
    self_vectors = x[torch.arange(len(x)), (types == 0).int().argmax(1)]
    queries = head.attention.to_query(self_vectors).unflatten(-1, (2, -1))
    keys = head.attention.to_key(x).unflatten(-1, (2, -1))
    expected = torch.einsum("bhd,bnhd->bhn", queries, keys)
    expected = expected / (DIM if scale == "model" else DIM // 2) ** 0.5
    logits = head.logits(x, None, types)
    torch.testing.assert_close(logits[one_self], expected[one_self])


@pytest.mark.parametrize("num_heads", [1, 2, DIM])
def test_pool_is_attention_with_identities_and_no_residual(num_heads: int) -> None:
    head = make_head("ada", num_heads=num_heads, residual=False)
    with torch.no_grad():
        for part in (head.attention.to_value, head.attention.to_out):
            nn.init.eye_(part.weight)
        given_set = head.prepare(*random_set())
        weights = head.weights(*given_set)
        torch.testing.assert_close(theory.pool(given_set[0], weights), head(*given_set))


@given(seeds, st.booleans())
def test_max_weights_pool_to_the_maximum(seed: int, tied: bool) -> None:
    x, padding, types = make_head("max").prepare(*random_set(seed))
    if tied:
        x = x.round()
    weights = theory.max_weights(x, padding)
    pooled = theory.pool(x, weights)
    torch.testing.assert_close(pooled, make_head("max")(x, padding, types))
    assert not weights.mT[padding].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(x[:, 0]))


def test_the_largest_share_the_weight_of_a_feature() -> None:
    x = torch.tensor([[[1.0, 5.0], [2.0, 5.0], [2.0, 0.0], [9.0, 5.0]]])
    padding = torch.tensor([[False, False, False, True]])
    expected = [[[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0]]]
    assert theory.max_weights(x, padding).tolist() == expected
    empty = theory.max_weights(x, torch.ones_like(padding))
    assert not empty.any()


# Signal loss


def sets(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors that are zero under padding, padding, and signal: one at least."""
    x, padding, types = random_set(seed)
    signal = (types == 0) & ~padding
    signal[torch.arange(len(x)), (~padding).int().argmax(1)] = True
    return x.masked_fill(padding[..., None], 0.0), padding, signal


def test_loss_and_excess_by_hand() -> None:
    x = torch.tensor([[[0.0, 0.0], [2.0, 4.0], [7.0, 7.0]]])
    signal = torch.tensor([[True, True, False]])
    pooled = torch.tensor([[1.0, 0.0]])
    assert theory.signal_loss(x, pooled, signal).item() == (1 + 0 + 1 + 16) / 2 / 2
    assert theory.excess_loss(x, pooled, signal).item() == (0 + 4) / 2
    by_head = theory.signal_loss(x, pooled, signal, heads=2)
    assert by_head.tolist() == [[1.0, 8.0]]
    assert theory.excess_loss(x, pooled, signal, heads=2).tolist() == [[0.0, 4.0]]


@given(seeds)
def test_loss_is_the_signals_own_spread_and_the_excess(seed: int) -> None:
    x, _, signal = sets(seed)
    pooled = x.flip(0)[:, 0]
    spread = torch.stack(
        [
            row[mask].var(0, correction=0).mean()
            for row, mask in zip(x, signal, strict=True)
        ]
    )
    loss = theory.signal_loss(x, pooled, signal)[:, 0]
    excess = theory.excess_loss(x, pooled, signal)[:, 0]
    torch.testing.assert_close(loss, spread + excess)
    parts = theory.excess_loss(x, pooled, signal, heads=4)
    torch.testing.assert_close(parts.mean(1), excess)


@given(seeds)
def test_the_mean_of_the_signal_is_optimal(seed: int) -> None:
    """Corollary 3.3: its weights, 1/k and 0, leave no excess; others lose more."""
    x, _, signal = sets(seed)
    optimal = signal.double() / signal.sum(1, keepdim=True)
    best = theory.pool(x, optimal[:, None])
    assert theory.excess_loss(x, best, signal).abs().max() < 1e-20
    shifted = best + 0.1
    lowest = theory.signal_loss(x, best, signal)
    assert (lowest < theory.signal_loss(x, shifted, signal)).all()


@given(seeds)
def test_the_mean_of_all_is_optimal_without_noise(seed: int) -> None:
    """Corollary 3.5."""
    x, padding, _ = sets(seed)
    pooled = make_pooling("avg", dim=DIM)(x, padding)
    assert theory.excess_loss(x, pooled, ~padding).max() < 1e-20


def test_the_maximum_is_optimal_for_one_largest_signal_only() -> None:
    """Corollary 3.8."""
    x = torch.tensor([[[3.0, 3.0], [1.0, 2.0]], [[3.0, 1.0], [1.0, 2.0]]])
    signal = torch.tensor([[True, False], [True, False]])
    pooled = make_pooling("max", dim=2)(x)
    assert theory.excess_loss(x, pooled, signal)[:, 0].tolist() == [0.0, 0.5]


def test_without_signal_there_is_no_loss() -> None:
    x, _, signal = sets(0)
    signal[1] = False
    for loss in (theory.signal_loss, theory.excess_loss):
        losses = loss(x, x[:, 0], signal)[:, 0]
        assert losses.isnan().tolist() == [False, True, False, False]


@given(seeds)
def test_variance_is_that_of_all_vectors_that_are_there(seed: int) -> None:
    x, padding, _ = sets(seed)
    padding[2] = True
    x = x.masked_fill(padding[..., None], 0.0)
    variance, within = theory.variance(theory.moments(x, padding))
    present = x[~padding]
    expected = present.var(0, correction=0).mean()
    torch.testing.assert_close(variance, expected)
    rows = [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
    centered = torch.cat([part - part.mean(0) for part in rows if len(part)])
    share = centered.square().mean() / expected
    torch.testing.assert_close(within, share)
    whole = theory.variance(theory.moments(x))[0]
    torch.testing.assert_close(whole, x.flatten(0, 1).var(0, correction=0).mean())


@given(seeds)
def test_the_excess_of_the_mean_has_a_limit(seed: int) -> None:
    """It is (N - k)/k variances, as docs/theory.md states."""
    x = torch.randn(5, 9, DIM, generator=torch.Generator().manual_seed(seed))
    signal = (torch.arange(9) < 1 + seed % 9).expand(5, -1)
    x = x + 3.0 * signal[..., None]
    k = float(signal[0].sum())
    moments = theory.moments(x)
    excess = theory.excess_loss(x, moments.mean, signal).mean()
    assert excess / theory.variance(moments)[0] <= (9 - k) / k + 1e-9


def test_sets_of_one_mean_differ_only_within() -> None:
    x = torch.randn(6, NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    same = x - x.mean(1, keepdim=True)
    alike = same[:, :1].expand(-1, NUM_TOKENS, -1)
    assert theory.variance(theory.moments(same))[1] == pytest.approx(1.0)
    assert theory.variance(theory.moments(alike))[1] == pytest.approx(0.0)
