"""Theory: bounds that hold for all scores, losses against formulas by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from torch import Tensor, nn

from helpers.samples import DIM, NUM_TOKENS, heads, make_head, random_set
from marl_pool.pooling import make_pooling
from marl_pool_studies.adapool.diagnosis import theory
from marl_pool_studies.adapool.diagnosis.theory import Neighborhoods, WeightBounds

seeds = st.integers(0, 2**31)
Scored = tuple[Tensor, Tensor, Tensor]
"""Scores, signal and padding, each ``(B, N)``."""


@pytest.fixture(scope="module")
def scored() -> Scored:
    """2000 sets: scores with ties and of any magnitude, k from 0 to N, and N from 1."""
    rng, shape, row = np.random.default_rng(0), (2000, 12), (2000, 1)
    scores = rng.choice([1.0, 4.0, 40.0], row) * rng.uniform(-1, 1, shape)
    scores = np.where(rng.random(row) < 0.4, scores.round(), scores)
    scores[rng.random(shape) < 0.02] = 900.0
    signal = rng.random(shape) < rng.choice([0.0, 0.3, 0.7, 1.0], row)
    padding = rng.random(shape) < rng.random(row)
    padding[np.arange(2000), rng.integers(12, size=2000)] = False
    scores[padding] = rng.choice([0.0, 1e300, -1e300, np.nan], padding.sum())
    return tuple(torch.from_numpy(part) for part in (scores, signal, padding))


def weights_of(scores: Tensor, padding: Tensor) -> Tensor:
    """The softmax, by scipy, over the tokens present."""
    masked = scores.masked_fill(padding, -torch.inf)
    return torch.from_numpy(softmax(masked.numpy(), axis=-1))


def violations(
    scored: Scored,
    change: Callable[[Neighborhoods], Neighborhoods] = lambda ranges: ranges,
    swap: Callable[[WeightBounds], WeightBounds] = lambda bounds: bounds,
) -> int:
    scores, signal, padding = scored
    bounds = swap(theory.weight_bounds(change(theory.neighborhoods(*scored))))
    weights = weights_of(scores, padding)
    return int(theory.outside(weights, signal, bounds, padding).sum())


# The bounds


def test_the_printed_bounds_hold_for_all_scores(scored: Scored) -> None:
    assert violations(scored) == 0
    k, n, signal_width, _, margin, _ = theory.neighborhoods(*scored)
    # Each kind of set is among those tried.
    for kind in (
        *(margin < -1, margin > 1, (margin == 0) & (signal_width > 0)),
        *(k == 0, (k == n) & (n > 2), n == 1),
    ):
        assert kind.sum() > 10


WRONG: dict[str, dict[str, Callable[..., Any]]] = {
    "L_s and U_s": {
        "swap": lambda b: b._replace(signal_low=b.signal_high, signal_high=b.signal_low)
    },
    "L_eta and U_eta": {
        "swap": lambda b: b._replace(noise_low=b.noise_high, noise_high=b.noise_low)
    },
    "signal and noise": {"swap": lambda b: WeightBounds(*b[2:], *b[:2])},
    "M and D": {"change": lambda f: f._replace(margin=f.distance, distance=f.margin)},
    "both widths": {
        "change": lambda f: f._replace(
            signal_width=f.noise_width, noise_width=f.signal_width
        )
    },
    "the sign of M": {"change": lambda f: f._replace(margin=f.margin.abs())},
}


@pytest.mark.parametrize("mistake", WRONG.values(), ids=WRONG)
def test_swapped_bounds_and_neighborhoods_are_caught(mistake: Any, scored: Scored):
    assert violations(scored, **mistake) > 0


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


@pytest.mark.parametrize(
    ("kind", "missing", "optimal"), [("signal", "noise", 1 / 4), ("noise", "signal", 0)]
)
def test_without_noise_or_signal_its_terms_are_nan(kind, missing, optimal) -> None:
    signal = torch.full_like(SIGNAL, kind == "signal")
    neighborhood = theory.neighborhoods(SCORES, signal, PADDING)
    assert getattr(neighborhood, f"{kind}_width") == 4
    for name in (f"{missing}_width", "margin", "distance"):
        assert getattr(neighborhood, name).isnan()
    bounds = theory.weight_bounds(neighborhood)
    for side, exponent in (("low", -4), ("high", 4)):
        expected = pytest.approx(optimal - 1 / (1 + 3 * np.exp(exponent)))
        assert float(getattr(bounds, f"{kind}_{side}")) == expected
        assert getattr(bounds, f"{missing}_{side}").isnan()


def test_the_distance_is_margin_and_widths(scored: Scored) -> None:
    neighborhood = theory.neighborhoods(*scored)
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
def test_weights_are_the_softmax_of_the_logits(name: str, options: Any) -> None:
    head = make_head(name, **options)
    x, padding, types = random_set()
    padding[1] = True
    given_set = head.prepend(x, padding, types)
    logits = head.logits(*given_set)
    assert (logits is not None) == (name in ("ada", "set2set"))
    if logits is not None:
        present = ~padding[:, None].expand_as(logits)
        assert (logits[present].abs() < 1e3).all()
        mask = padding[2:, None].expand_as(logits[2:]).flatten(0, 1)
        expected = weights_of(logits[2:].detach().flatten(0, 1), mask)
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
    """Vectors (zero under padding), padding and signal masks; each set has signal."""
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
    rows = [row[mask] for row, mask in zip(x, signal, strict=True)]
    spread = torch.stack([row.var(0, correction=0).mean() for row in rows])
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
    variance, _ = theory.variance(theory.moments(x))
    torch.testing.assert_close(variance, x.flatten(0, 1).var(0, correction=0).mean())


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
    centered = x - x.mean(1, keepdim=True)
    constant = centered[:, :1].expand(-1, NUM_TOKENS, -1)
    assert theory.variance(theory.moments(centered))[1] == pytest.approx(1.0)
    assert theory.variance(theory.moments(constant))[1] == pytest.approx(0.0)
