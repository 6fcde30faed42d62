"""Robust means of returns and scores, with bootstrap intervals.

Scores of several runs are ``(..., runs, conditions)``: a task of Agarwal et al. (2021,
https://arxiv.org/abs/2108.13264) is a condition here, such as a perturbation. The
definitions follow their package rliable, in numpy to save a dependency; tests
compare them with scipy. Difference: the bootstrap is not stratified, as a resampled run
brings the scores of all its conditions, which one policy got.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
CONFIDENCE = 0.95
BLOCK = 2**24
"""Numbers that are drawn at once: 128 MiB, whatever the number of episodes."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""Reduces the last axis."""


class Interval(NamedTuple):
    """An estimate and the confidence interval around it; NaN where it is unknown."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, decimals: int = 3) -> str:
        """Return ``value [low, high]``, without what is unknown."""
        if math.isnan(self.value):
            return ""
        value, low, high = (f"{number:.{decimals}f}" for number in self)
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"


def mean(values: np.ndarray) -> np.ndarray:
    """Average over the last axis."""
    return values.mean(-1)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Average over the last axis without its lowest and highest ``floor(n / 4)``.

    Source: Agarwal et al., *Deep Reinforcement Learning at the Edge of the
    Statistical Precipice* (2021). Equals scipy's ``trim_mean`` at 0.25. NaN among the
    values, which sorting would cut off, gives NaN.
    """
    count = values.shape[-1]
    cut = count // 4
    means = np.sort(values, axis=-1)[..., cut : count - cut].mean(-1)
    # The index makes a number of an array without dimensions.
    return np.where(np.isnan(values).any(-1), np.nan, means)[()]


def interquartile_score(scores: np.ndarray) -> np.ndarray:
    """Compute the interquartile mean over runs and conditions, the last two axes.

    Source: Agarwal et al. (2021), section 4.3.
    """
    return interquartile_mean(scores.reshape(*scores.shape[:-2], -1))


def probability_of_improvement(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Estimate the probability that a run of one method outscores one of another.

    For each condition it is the fraction of pairs of runs that the first one wins, with
    half a win for a tie: the Mann–Whitney U divided by n · m. The result is the mean
    over conditions.

    Source: Agarwal et al. (2021), section 4.3.

    Args:
        first: ``(..., n, conditions)`` scores of a method's runs.
        second: ``(..., m, conditions)`` scores of the other method's runs.

    Returns:
        ``(...)``; NaN if a score is NaN.
    """
    scores, opponents = first[..., :, None, :], second[..., None, :, :]
    wins = (scores > opponents) + 0.5 * (scores == opponents)
    # A comparison with NaN is False, and would count as a loss.
    comparable = ~(np.isnan(scores) | np.isnan(opponents))
    return np.where(comparable, wins, np.nan).mean((-3, -2, -1))


def percentile_interval(value: float, resampled: np.ndarray) -> Interval:
    """Return an estimate with its 95 % percentile bootstrap interval.

    Args:
        value: estimate from the sample itself.
        resampled: ``(resamples,)`` estimates from resamples; if one is not finite, the
            bounds are NaN.
    """
    if not np.isfinite(resampled).all():
        return Interval(value)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, (tail, 100 - tail))
    return Interval(value, float(low), float(high))


def episode_resamples(
    episodes: int, *, seed: int = 0, resamples: int = RESAMPLES
) -> np.ndarray:
    """Resample episodes with replacement, as weights that sum to 1.

    The same weights serve all rows and runs of the same environments, so that
    differences between environments cancel in comparisons.

    Returns:
        ``(resamples, episodes)``.
    """
    blocks = [*weight_blocks(episodes, seed=seed, resamples=resamples)]
    return np.concatenate(blocks)


def weight_blocks(
    episodes: int, *, seed: int = 0, resamples: int = RESAMPLES
) -> Iterator[np.ndarray]:
    """Yield the rows of `episode_resamples` in blocks, to save memory."""
    generator = np.random.default_rng(seed)
    uniform = np.full(episodes, 1 / episodes)
    for rows in _block_sizes(resamples, episodes):
        yield generator.multinomial(episodes, uniform, rows) / episodes


def _block_sizes(rows: int, width: int) -> Iterator[int]:
    """Split rows of ``width`` numbers into blocks of `BLOCK` numbers at most."""
    most = max(1, BLOCK // width)
    for start in range(0, rows, most):
        yield min(most, rows - start)


def bootstrap(
    values: ArrayLike,
    statistic: Statistic = mean,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Estimate a statistic and its 95 % percentile bootstrap interval.

    Source: Efron and Tibshirani, *An Introduction to the Bootstrap* (1993), chapter
    13.

    Args:
        values: ``(n,)`` independent observations.
        statistic: reduces the last axis.
        seed: seed of the resampling.
        resamples: number of resamples, each n draws with replacement.

    Returns:
        The interval, whose bounds are NaN for a single observation.
    """
    sample = np.asarray(values, dtype=np.float64)
    value = float(statistic(sample))
    if len(sample) < 2:
        return Interval(value)
    generator = np.random.default_rng(seed)
    # One block after the other draws the same numbers as all at once.
    resampled = [
        statistic(sample[generator.integers(len(sample), size=(rows, len(sample)))])
        for rows in _block_sizes(resamples, len(sample))
    ]
    return percentile_interval(value, np.concatenate(resampled))


def paired_drop(clean: ArrayLike, perturbed: ArrayLike, *, seed: int = 0) -> Interval:
    """Estimate the mean of ``clean - perturbed`` and its interval; positive is harm.

    Both are ``(n,)`` returns in the same environments. Differences between these
    cancel, so the interval is narrower than for a difference of two means.
    """
    return bootstrap(np.subtract(clean, perturbed), seed=seed)
