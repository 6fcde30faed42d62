"""Comparison of methods by a bootstrap over training seeds, then over episodes.

A method was trained several times, with different seeds, and each run played several
episodes. A claim about the method must hold for new training seeds. An interval
therefore resamples runs with replacement, and within them episodes.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from marl_pool.evaluation.statistics.intervals import (
    Interval,
    around,
    interquartile_score,
    probability_of_improvement,
)
from marl_pool.evaluation.statistics.scores import score_of

RANKED_FROM = 5
"""Least number of seeds of each method for a ranking."""
INTERVAL_FROM = 2
"""Least number of seeds for an interval over seeds."""
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))

Aggregate = Callable[[np.ndarray], np.ndarray]
"""Reduces scores ``(..., runs, conditions)`` to ``(...)``."""


@dataclass(frozen=True)
class Scores:
    """Scores of one method.

    Attributes:
        name: of the method; it seeds the resampling of its runs.
        points: ``(runs, conditions)``, the mean over all episodes of each run.
        resamples: ``(resamples, runs, conditions)``, each with resampled episodes.
    """

    name: str
    points: np.ndarray
    resamples: np.ndarray

    @property
    def seeds(self) -> int:
        """Number of runs, which differ only in their seed."""
        return len(self.points)

    def of(self, conditions: Sequence[int]) -> "Scores":
        """The scores under some of the conditions, by their column."""
        places = list(conditions)
        return Scores(self.name, self.points[:, places], self.resamples[..., places])

    def resampled(self) -> np.ndarray:
        """``(resamples, runs, conditions)`` scores of resampled runs and episodes."""
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        count = len(self.resamples)
        # Each resample of the episodes meets a resample of the runs.
        chosen = generator.integers(self.seeds, size=(count, self.seeds))
        return self.resamples[np.arange(count)[:, None], chosen]


def scores_of(name: str, episodes: np.ndarray, weights: np.ndarray) -> Scores:
    """Score a method's runs, and again for each resample of the episodes.

    Args:
        name: of the method.
        episodes: ``(runs, conditions, 3, episodes)`` returns of the run, the random
            policy and the scripted one in the same environments. 0 and 1 in place of
            the latter two leave returns unchanged.
        weights: from `episode_resamples`.

    Returns:
        Scores that are NaN where the scripted policy is not the better one (`score_of`)
        and resamples that are NaN for a single episode, whose spread is unknown.
    """
    # (runs, conditions, resamples), each a score of resampled mean returns.
    resamples = score_of(np.moveaxis(episodes @ weights.T, 2, -1))
    if weights.shape[-1] < 2:
        resamples = np.full_like(resamples, np.nan)
    return Scores(name, score_of(episodes.mean(-1)), np.moveaxis(resamples, -1, 0))


def mean_score(scores: np.ndarray) -> np.ndarray:
    """Mean over runs and conditions, the last two axes."""
    return np.mean(scores, (-2, -1))


def over_seeds(scores: Scores, aggregate: Aggregate) -> Interval:
    """Aggregate a method's scores, with an interval over seeds and episodes.

    Bounds are NaN below `INTERVAL_FROM` seeds, and if a resample has no score.
    """
    value = float(aggregate(scores.points))
    if scores.seeds < INTERVAL_FROM:
        return UNKNOWN._replace(value=value)
    return around(value, aggregate(scores.resampled()))


def this_policy_only(scores: Scores, aggregate: Aggregate) -> Interval:
    """Aggregate a method's scores, with an interval over these runs' episodes only."""
    return around(float(aggregate(scores.points)), aggregate(scores.resamples))


def improvement(first: Scores, second: Scores) -> Interval:
    """Probability that a run of the first method outscores one of the second.

    Bounds are NaN if either has fewer than `INTERVAL_FROM` seeds, or a resample has no
    score.
    """
    value = float(probability_of_improvement(first.points, second.points))
    if min(first.seeds, second.seeds) < INTERVAL_FROM:
        return UNKNOWN._replace(value=value)
    resampled = probability_of_improvement(first.resampled(), second.resampled())
    return around(value, resampled)


class Ranking(NamedTuple):
    """Names and interquartile means of methods, best first.

    ``refusal`` is the reason why they are not ordered; empty if they are.
    """

    places: list[tuple[str, Interval]]
    refusal: str = ""


def rank(methods: Mapping[str, Scores]) -> Ranking:
    """Order methods by their interquartile mean over seeds and conditions.

    Below `RANKED_FROM` seeds of any of them they stay in the order given.

    Args:
        methods: scores under the same conditions, by name of the method.
    """
    places = [
        (name, over_seeds(scores, interquartile_score))
        for name, scores in methods.items()
    ]
    fewest = min(scores.seeds for scores in methods.values())
    if fewest >= RANKED_FROM:
        return Ranking(sorted(places, key=lambda place: -place[1].value))
    seeds = "1 seed" if fewest == 1 else f"{fewest} seeds"
    reason = f"{seeds} of a method, and an order is given from {RANKED_FROM} on"
    return Ranking(places, f"Not ranked: {reason}.")
