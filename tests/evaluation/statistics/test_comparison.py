"""Comparisons resample seeds first, episodes second; environments stay paired."""

import numpy as np
import pytest
from scipy import stats

from marl_pool.evaluation.statistics.intervals import (
    Interval,
    episode_resamples,
    interquartile_score,
)
from marl_pool.evaluation.statistics.scores import (
    RANKED_FROM,
    Scores,
    improvement,
    joined,
    mean_score,
    over_seeds,
    rank,
    scores_of,
    this_policy_only,
)

EPISODES = 64


def runs(
    seeds: int, spread: float, *, level: float = 0.0, noise: float = 0.1, seed: int = 0
) -> np.ndarray:
    """Returns ``(runs, 1, 3, episodes)``; seeds differ by ``spread``."""
    generator = np.random.default_rng(seed)
    means = level + spread * generator.normal(size=(seeds, 1, 1))
    policy_returns = means + noise * generator.normal(size=(seeds, 1, EPISODES))
    ends = [np.full_like(policy_returns, value) for value in (0.0, 1.0)]
    return np.stack([policy_returns, *ends], axis=2)


def method_scores(name: str, episodes: np.ndarray, resamples: int = 2000) -> Scores:
    return scores_of(name, episodes, episode_resamples(EPISODES, resamples=resamples))


def width(interval: Interval) -> float:
    return interval.high - interval.low


# Scores


def test_a_score_is_between_the_random_and_the_scripted_mean() -> None:
    episodes = np.array([[[[1.0, 3.0], [0.0, 0.0], [4.0, 4.0]]]])
    scores = scores_of("a", episodes, np.array([[0.5, 0.5], [1.0, 0.0]]))
    assert scores.points.tolist() == [[0.5]]
    # The second resample has the first episode twice, of the baselines too.
    assert scores.resamples[:, 0, 0].tolist() == [0.5, 0.25]


def test_differences_between_environments_cancel_in_a_score() -> None:
    luck = 10 * np.random.default_rng(0).normal(size=EPISODES)
    episodes = np.stack([luck + end for end in (0.5, 0.0, 1.0)])[None, None]
    interval = this_policy_only(method_scores("a", episodes), mean_score)
    assert width(interval) < 1e-9
    assert interval.value == pytest.approx(0.5)


def test_a_scripted_policy_that_is_no_better_gives_no_number() -> None:
    episodes = np.ones((2, 1, 3, EPISODES))
    interval = over_seeds(method_scores("a", episodes), mean_score)
    assert np.isnan(interval).all()


def with_similar_baselines(seeds: int) -> np.ndarray:
    """The scripted policy is better in one episode only, which some resamples omit."""
    episodes = runs(seeds, spread=0.1)
    episodes[:, :, 2] = 0.0
    episodes[:, :, 2, 0] = 1.0
    return episodes


def test_a_resample_without_baselines_leaves_a_number_and_no_interval() -> None:
    degenerate = method_scores("a", with_similar_baselines(6))
    usual = method_scores("b", runs(6, 0.1))
    assert 0 < np.isnan(degenerate.resamples).mean() < 1
    for interval in (
        over_seeds(degenerate, mean_score),
        this_policy_only(degenerate, mean_score),
        improvement(degenerate, usual),
        improvement(usual, degenerate),
        *dict(rank({"a": degenerate}).places).values(),
    ):
        assert np.isfinite(interval.value)
        assert np.isnan([interval.low, interval.high]).all()


def test_one_episode_has_no_interval() -> None:
    scores = scores_of("a", runs(5, 1.0)[..., :1], episode_resamples(1))
    for interval_of in (over_seeds, this_policy_only):
        interval = interval_of(scores, mean_score)
        assert np.isfinite(interval.value)
        assert np.isnan([interval.low, interval.high]).all()


def test_draws_are_of_as_many_episodes_with_replacement() -> None:
    weights = episode_resamples(10, resamples=4000)
    assert weights.shape == (4000, 10)
    np.testing.assert_allclose(weights.sum(1), 1)
    # Each is left out with probability (1 - 1/10)^10.
    assert (weights == 0).mean() == pytest.approx(0.9**10, abs=0.01)


# Intervals


def test_an_interval_over_seeds_includes_their_spread() -> None:
    scores = method_scores("a", runs(6, spread=1.0, noise=0.01))
    outer, inner = (f(scores, mean_score) for f in (over_seeds, this_policy_only))
    assert outer.value == inner.value
    assert width(outer) > 50 * width(inner)


def test_an_interval_over_equal_seeds_is_that_over_episodes() -> None:
    episodes = runs(1, spread=0.0, noise=1.0)
    scores = method_scores("a", np.repeat(episodes, 5, axis=0))
    outer, inner = (f(scores, mean_score) for f in (over_seeds, this_policy_only))
    # Their episodes are of the same environments, so five runs are as uncertain as one.
    assert outer == inner


def test_resampled_seeds_agree_with_scipys_bootstrap_of_the_means() -> None:
    episodes = runs(12, spread=1.0, noise=0.0)
    interval = over_seeds(method_scores("a", episodes, 20_000), mean_score)
    means = episodes[:, 0, 0].mean(-1)
    expected = stats.bootstrap(
        (means,), np.mean, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    assert interval.low == pytest.approx(expected.low, abs=0.02)
    assert interval.high == pytest.approx(expected.high, abs=0.02)


def test_one_seed_has_no_interval_over_seeds() -> None:
    scores = method_scores("a", runs(1, spread=1.0))
    interval = over_seeds(scores, mean_score)
    assert interval.value == scores.points[0, 0]
    assert np.isnan([interval.low, interval.high]).all()


def test_methods_draw_their_seeds_independently() -> None:
    episodes = runs(8, spread=1.0)
    first, repeated, independent = (
        method_scores(name, episodes).resampled() for name in ("a", "a", "b")
    )
    np.testing.assert_array_equal(first, repeated)
    assert abs(np.corrcoef(first.mean((1, 2)), independent.mean((1, 2)))[0, 1]) < 0.1


def test_scores_under_several_conditions_are_joined() -> None:
    parts = [
        Scores("a", np.array([[score], [score + 3]]), np.full((4, 2, 1), score))
        for score in (2.0, 0.0)
    ]
    joint = joined(parts)
    assert joint.points.tolist() == [[2.0, 0.0], [5.0, 3.0]]
    assert joint.resamples[0].tolist() == [[2.0, 0.0]] * 2


# Comparisons


def test_improvement_of_separate_similar_and_equal_methods() -> None:
    low, high = runs(6, 0.1), runs(6, 0.1, level=9.0, seed=1)
    first, equal = method_scores("a", low), method_scores("b", low)
    separate = improvement(method_scores("high", high), first)
    assert separate == (1.0, 1.0, 1.0)
    similar = improvement(first, method_scores("b", runs(6, 0.1, seed=2)))
    assert similar.low < 0.5 < similar.high
    assert improvement(first, equal).value == 0.5


def test_improvement_over_a_single_seed_has_no_interval() -> None:
    single, several = method_scores("a", runs(1, 1.0)), method_scores("b", runs(5, 1.0))
    for pair in ((single, several), (several, single)):
        interval = improvement(*pair)
        assert 0 <= interval.value <= 1
        assert np.isnan([interval.low, interval.high]).all()


@pytest.mark.parametrize("seeds", [1, 4])
def test_few_seeds_are_not_ranked(seeds: int) -> None:
    methods = {
        "low": method_scores("low", runs(RANKED_FROM, 0.1)),
        "high": method_scores("high", runs(seeds, 0.1, level=5.0)),
    }
    ranking = rank(methods)
    words = "only 1 seed," if seeds == 1 else "only 4 seeds,"
    assert words in ranking.refusal
    assert [name for name, _ in ranking.places] == ["low", "high"]


def test_methods_with_an_undefined_score_are_not_ranked() -> None:
    undefined = runs(RANKED_FROM, 0.1)
    methods = {
        "a": method_scores("a", undefined),
        "b": method_scores("b", runs(RANKED_FROM, 0.1, level=5.0)),
    }
    methods["a"].points[0, 0] = np.nan
    ranking = rank(methods)
    assert ranking.refusal == "Not ranked: a score of a is undefined."
    assert [name for name, _ in ranking.places] == ["a", "b"]


def test_enough_seeds_are_ranked_by_interquartile_mean() -> None:
    methods = {
        name: method_scores(name, runs(RANKED_FROM, 0.1, level=level))
        for name, level in (("low", 0.0), ("high", 5.0), ("middle", 2.0))
    }
    ranking = rank(methods)
    assert not ranking.refusal
    assert [name for name, _ in ranking.places] == ["high", "middle", "low"]
    for name, interval in ranking.places:
        assert interval.value == float(interquartile_score(methods[name].points))
        assert interval.low < interval.value < interval.high


def test_the_published_order_of_resampling_covers_a_new_seed() -> None:
    """Resampling episodes alone would mostly miss the method's mean."""
    generator = np.random.default_rng(0)
    covered = {over_seeds: 0, this_policy_only: 0}
    for trial in range(100):
        episodes = runs(10, 1.0, seed=int(generator.integers(1 << 30)))
        scores = method_scores(f"method {trial}", episodes, resamples=200)
        for interval_of in covered:
            interval = interval_of(scores, mean_score)
            covered[interval_of] += interval.low <= 0.0 <= interval.high
    assert covered[over_seeds] >= 80
    assert covered[this_policy_only] < 50
