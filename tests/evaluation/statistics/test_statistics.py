"""Statistics against scipy and values worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_pool.evaluation.statistics import intervals
from marl_pool.evaluation.statistics.intervals import (
    Interval,
    Statistic,
    bootstrap,
    episode_resamples,
    interquartile_mean,
    interquartile_score,
    mean,
    paired_drop,
    percentile_interval,
    probability_of_improvement,
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_interquartile_mean_is_scipys_quarter_trimmed_mean(values: list[float]) -> None:
    array = np.array(values)
    mean, expected = interquartile_mean(array), stats.trim_mean(array, 0.25)
    np.testing.assert_allclose(mean, expected, rtol=1e-9, atol=1e-6)


def test_interquartile_mean_by_hand_and_along_the_last_axis() -> None:
    # floor(6 / 4) = 1 falls away at each end.
    values = np.array([[100.0, 1, 2, 3, 4, -100], [0, 0, 0, 0, 0, 60]])
    np.testing.assert_array_equal(interquartile_mean(values), [2.5, 0.0])
    assert np.isnan(interquartile_mean(np.array([1.0, 2.0, 3.0, np.nan])))


@pytest.mark.parametrize("statistic", [np.mean, interquartile_mean])
def test_one_episode_has_no_spread(statistic: Any) -> None:
    value, *bounds = bootstrap([2.0], statistic)
    assert value == 2.0
    assert np.isnan(bounds).all()


def test_bootstrap_agrees_with_scipy() -> None:
    sample = np.random.default_rng(1).gamma(2.0, size=80)
    interval = bootstrap(sample, resamples=20_000)
    expected = stats.bootstrap(
        (sample,), np.mean, method="percentile", n_resamples=20_000, rng=2
    ).confidence_interval
    # Both ends are themselves estimates, with an error of about 0.003 here.
    assert interval.low == pytest.approx(expected.low, abs=0.02)
    assert interval.high == pytest.approx(expected.high, abs=0.02)
    assert interval.low < interval.value < interval.high


def test_bootstrap_of_a_custom_statistic() -> None:
    interval = bootstrap(np.arange(9.0), lambda values: np.median(values, axis=-1))
    assert interval.value == 4.0
    assert interval.low < 4.0 < interval.high


def test_an_interval_is_between_the_percentiles_2_5_and_97_5() -> None:
    samples = np.random.default_rng(0).permutation(np.arange(1001.0))
    interval = percentile_interval(400.0, samples)
    assert interval == pytest.approx((400.0, 25.0, 975.0))


@pytest.mark.parametrize("unknown", [np.nan, np.inf])
def test_an_interval_of_resamples_without_a_value_is_unknown(unknown: float) -> None:
    interval = percentile_interval(1.0, np.array([0.0, unknown, 2.0, 3.0]))
    np.testing.assert_array_equal(interval, [1.0, np.nan, np.nan])


def test_resamples_are_of_n_observations_each_equally_likely() -> None:
    batches = []

    def watched(values: np.ndarray) -> np.ndarray:
        batches.append(values)
        return values.mean(-1)

    bootstrap(np.arange(5.0), watched, resamples=10_000)
    resamples = batches[-1]
    assert resamples.shape == (10_000, 5)
    shares = np.bincount(resamples.ravel().astype(int), minlength=5) / 50_000
    # The standard error of a share is 0.0018.
    np.testing.assert_allclose(shares, 0.2, atol=0.01)


@pytest.mark.parametrize("block", [1, 7, 70, 150, 7 * 2000 - 1])
@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_blocks_of_resamples_are_those_drawn_at_once(
    statistic: Statistic, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = np.random.default_rng(0).normal(size=7)
    interval, weights = bootstrap(sample, statistic), episode_resamples(7)
    indices = np.random.default_rng(0).integers(7, size=(2000, 7))
    value = float(statistic(sample))
    assert interval == percentile_interval(value, statistic(sample[indices]))
    generator = np.random.default_rng(0)
    counts = generator.multinomial(7, np.full(7, 1 / 7), 2000)
    np.testing.assert_array_equal(weights, counts / 7)
    monkeypatch.setattr(intervals, "BLOCK", block)
    sizes = []

    def watched(values: np.ndarray) -> np.ndarray:
        sizes.append(values.size)
        return statistic(values)

    assert bootstrap(sample, watched) == interval
    assert max(sizes[1:]) <= max(block, 7)
    np.testing.assert_array_equal(episode_resamples(7), weights)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    covered = []
    for _ in range(200):
        interval = bootstrap(generator.normal(size=40), resamples=400)
        covered.append(interval.low <= 0.0 <= interval.high)
    assert 0.88 <= np.mean(covered) <= 0.99


def test_a_seed_fixes_the_interval_and_another_moves_it() -> None:
    sample = np.random.default_rng(0).normal(size=30)
    assert bootstrap(sample, seed=5) == bootstrap(sample, seed=5)
    assert bootstrap(sample, seed=5) != bootstrap(sample, seed=6)
    drop = paired_drop(sample, sample**2, seed=5)
    assert drop == bootstrap(sample - sample**2, seed=5)
    assert drop != paired_drop(sample, sample**2, seed=6)


def test_drop_is_positive_for_harm_and_pairs_the_environments() -> None:
    luck = np.random.default_rng(0).normal(scale=10.0, size=64)
    drop = paired_drop(luck, luck - 0.5)
    # The environments differ by far more than the harm; paired, they don't blur it.
    np.testing.assert_allclose(drop, [0.5, 0.5, 0.5], rtol=1e-9)
    # Equal returns have a drop of exactly 0.
    assert paired_drop(luck, luck.copy()) == (0.0, 0.0, 0.0)


# Scores of several runs


def scores(seed: int, runs: int, conditions: int = 3) -> np.ndarray:
    """With ties, in quarters."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 8, size=(runs, conditions)) / 4


def test_interquartile_score_is_over_runs_and_conditions_together() -> None:
    sample = scores(0, 7, 4)
    expected = stats.trim_mean(sample, 0.25, axis=None)
    assert interquartile_score(sample) == pytest.approx(expected)
    # A mean of the conditions' own interquartile means is another number.
    mean_of_conditions = stats.trim_mean(sample, 0.25, axis=0).mean()
    assert interquartile_score(sample) != pytest.approx(mean_of_conditions)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_probability_of_improvement_is_mann_and_whitneys_u(n, m, seed):
    first, second = scores(seed, n), scores(seed + 1, m)
    u = stats.mannwhitneyu(first, second, alternative="greater").statistic
    expected = (u / (n * m)).mean()
    assert probability_of_improvement(first, second) == pytest.approx(expected)
    reverse = probability_of_improvement(second, first)
    assert reverse == pytest.approx(1 - expected)


def test_probability_of_improvement_by_hand() -> None:
    first, second = np.array([[1.0], [3.0]]), np.array([[1.0], [2.0]])
    # 1 ties with 1 and loses to 2; 3 wins twice.
    assert probability_of_improvement(first, second) == 2.5 / 4
    assert probability_of_improvement(first, first) == 0.5


def test_probability_of_improvement_of_many_draws_at_once() -> None:
    first = np.stack([scores(seed, 4) for seed in range(5)])
    second = np.stack([scores(seed + 9, 3) for seed in range(5)])
    batched = probability_of_improvement(first, second)
    separate = list(map(probability_of_improvement, first, second))
    np.testing.assert_allclose(batched, separate)


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 2, 1)])
def test_nan_scores_give_nan_probabilities_of_improvement(place):
    first = np.stack([scores(seed, 3) for seed in range(2)])
    second = np.stack([scores(seed + 5, 4) for seed in range(2)])
    intact_run = 1 - place[0]
    intact = probability_of_improvement(first, second)
    first[place] = np.nan
    for shares, expected in (
        (probability_of_improvement(first, second), intact),
        (probability_of_improvement(second, first), 1 - intact),
    ):
        assert np.isnan(shares[place[0]])
        assert shares[intact_run] == pytest.approx(expected[intact_run])


def test_unknown_bounds_are_not_printed() -> None:
    assert Interval(1.0, 0.5, 1.5).text(1) == "1.0 [0.5, 1.5]"
    assert Interval(1.0).text() == "1.000"
    assert Interval(math.nan).text() == ""
