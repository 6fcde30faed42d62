"""Normalized scores, 0 for the random policy and 1 for the scripted one.

They compare methods. Each was trained with several seeds, and each of its runs played
several episodes. A claim about a method must hold for new training seeds, so an
interval resamples runs with replacement, and episodes as well.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from marl_pool.evaluation.results import CLEAN, TRANSFER, Result, SeverityAUC
from marl_pool.evaluation.statistics.intervals import (
    Interval,
    interquartile_score,
    percentile_interval,
    probability_of_improvement,
    weight_blocks,
)

RANDOM, HEURISTIC = "random", "heuristic"
RANKED_FROM = 5
"""Minimum number of seeds of each method for a ranking."""
INTERVAL_FROM = 2
"""Minimum number of seeds for an interval over seeds."""

Aggregate = Callable[[np.ndarray], np.ndarray]
"""Reduces scores ``(..., runs, conditions)`` to ``(...)``."""


class NormalizationBaselines(NamedTuple):
    """``(episodes,)`` returns of the policies that score 0 and 1 in one environment."""

    random: np.ndarray
    heuristic: np.ndarray


def normalized(
    returns: np.ndarray, baselines: NormalizationBaselines, *, seed: int = 0
) -> Interval:
    """Score returns: ``(mean - random) / (heuristic - random)``, with an interval.

    Raw returns cannot be compared between environments, and ratios of negative ones
    mean nothing. The interval is over episodes, so it holds for *this policy only*. All
    three samples are resampled together, environment by environment, so that the
    interval includes the error of the baselines. It is NaN if the scripted policy is
    not the better one in some resample (`score_of`).

    Source: normalized scores of Agarwal et al. (2021,
    https://arxiv.org/abs/2108.13264), with a scripted policy in place of a human's
    score.

    Args:
        returns: ``(episodes,)`` in the environments of the baselines.
        baselines: returns in the unperturbed environments.
        seed: seed of the bootstrap.
    """
    sample = np.stack([returns, *baselines], 1)
    score = float(score_of(sample.mean(0)))
    if len(sample) < 2:
        return Interval(score)
    # The mean of a resample depends only on how often it has each episode.
    means = [weights @ sample for weights in weight_blocks(len(sample), seed=seed)]
    return percentile_interval(score, score_of(np.concatenate(means)))


def score_of(means: np.ndarray) -> np.ndarray:
    """Score mean returns ``(..., 3)`` of the policy, the random and the scripted one.

    NaN where the scripted policy is not the better baseline.
    """
    policy, random, heuristic = np.moveaxis(means, -1, 0)
    width = np.where(heuristic > random, heuristic - random, np.nan)
    score: np.ndarray = (policy - random) / width
    return score


def scored(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[Result]:
    """Fill in the scores of rows whose environment has both baselines.

    Where several groups learn there are no scores, since a baseline's return in one
    group depends on the policy of another. ``returns`` are ``(rows, episodes)``.
    """
    baselines = _baselines(results, returns)
    rows = []
    for row, row_returns in zip(results, returns, strict=True):
        pair = _pair(baselines, row)
        if pair and not row.missing:
            score, low, high = normalized(row_returns, pair, seed=seed)
            row = replace(row, score=score, score_low=low, score_high=high)
        rows.append(row)
    return rows


def severity_aucs(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[SeverityAUC]:
    """Average the score over the severities of each perturbation; see `scored`."""
    # Separate clean and perturbed rows of each policy.
    baselines = _baselines(results, returns)
    clean: dict[tuple[Any, ...], np.ndarray] = {}
    perturbed: dict[tuple[Any, ...], list[tuple[Result, np.ndarray]]] = {}
    for row, row_returns in zip(results, returns, strict=True):
        policy = (row.group, row.policy, row.stochastic)
        if row.perturbation == CLEAN:
            clean[policy] = row_returns
        elif row.perturbed:
            perturbed.setdefault((*policy, row.label), []).append((row, row_returns))
    aucs = []
    for key, rows in perturbed.items():
        first = rows[0][0]
        # Clean episodes are the level at severity 0.
        levels = {0.0: clean[key[:-1]]} | {
            row.severity: row_returns for row, row_returns in rows
        }
        # An AUC needs baselines and a result at every severity.
        severities = sorted(levels)
        auc = Interval(np.nan)
        pair = _pair(baselines, first)
        if pair and not any(row.missing for row, _ in rows) and severities[-1] > 0:
            mean = mean_over([levels[severity] for severity in severities], severities)
            auc = normalized(mean, pair, seed=seed)
        names = ("group", "policy", "stochastic", "perturbation", "label", "options")
        attributes: dict[str, Any] = {name: getattr(first, name) for name in names}
        attributes |= zip(("auc", "auc_low", "auc_high"), auc, strict=True)
        aucs.append(SeverityAUC(**attributes, severities=severities))
    return aucs


def mean_over(levels: Sequence[np.ndarray], severities: Sequence[float]) -> np.ndarray:
    """Average ``(episodes,)`` returns over severity by the trapezoidal rule.

    There must be two or more severities, in increasing order.
    """
    area: np.ndarray = np.trapezoid(np.stack(levels), severities, axis=0)
    return area / (severities[-1] - severities[0])


_EnvKey = tuple[str, str, bool]
"""Group, label of another environment, and whether all groups sample."""


def _env_key(row: Result) -> _EnvKey:
    label = row.label if row.perturbation == TRANSFER else CLEAN
    return row.group, label, row.stochastic


def _pair(
    baselines: Mapping[_EnvKey, NormalizationBaselines], row: Result
) -> NormalizationBaselines | None:
    """Return the baselines of a row, sampled ones if they were played."""
    group, label, stochastic = _env_key(row)
    pair = baselines.get((group, label, False))
    return baselines.get((group, label, stochastic), pair)


def _baselines(
    results: Sequence[Result], returns: np.ndarray
) -> dict[_EnvKey, NormalizationBaselines]:
    """Collect the baselines of each environment that has both, by `_env_key`."""
    if len({row.group for row in results if not row.fixed}) != 1:
        return {}
    baseline_returns = {
        (_env_key(row), row.policy): row_returns
        for row, row_returns in zip(results, returns, strict=True)
        if not row.missing and not row.fixed
    }
    return {
        env: NormalizationBaselines(
            baseline_returns[env, RANDOM], baseline_returns[env, HEURISTIC]
        )
        for env, policy in baseline_returns
        if policy == RANDOM and (env, HEURISTIC) in baseline_returns
    }


# Comparison of methods


@dataclass(frozen=True)
class Scores:
    """Scores of one method.

    Attributes:
        name: name of the method, which seeds the resampling of its runs.
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

    def resampled(self) -> np.ndarray:
        """Resample runs as well: ``(resamples, runs, conditions)`` scores."""
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        count = len(self.resamples)
        # Pair each resample of the episodes with a resample of the runs.
        indices = generator.integers(self.seeds, size=(count, self.seeds))
        return self.resamples[np.arange(count)[:, None], indices]


def scores_of(name: str, episodes: np.ndarray, weights: np.ndarray) -> Scores:
    """Score a method's runs, and again for each resample of the episodes.

    Args:
        name: name of the method.
        episodes: ``(runs, conditions, 3, episodes)`` returns of the run, the random
            policy and the scripted one in the same environments. With 0 and 1 in place
            of the latter two, scores are returns.
        weights: ``(resamples, episodes)`` from `episode_resamples`.

    Returns:
        Scores that are NaN where the scripted policy is not the better one (`score_of`)
        and resamples that are NaN for a single episode, whose spread is unknown.
    """
    # (runs, conditions, resamples), each a score of resampled mean returns.
    resamples = score_of(np.moveaxis(episodes @ weights.T, 2, -1))
    if weights.shape[-1] < 2:
        resamples = np.full_like(resamples, np.nan)
    return Scores(name, score_of(episodes.mean(-1)), np.moveaxis(resamples, -1, 0))


def joined(scores: Iterable[Scores]) -> Scores:
    """Join the scores of one method's runs under several conditions."""
    parts = list(scores)
    points = np.concatenate([part.points for part in parts], -1)
    resamples = np.concatenate([part.resamples for part in parts], -1)
    return Scores(parts[0].name, points, resamples)


def mean_score(scores: np.ndarray) -> np.ndarray:
    """Average over runs and conditions, the last two axes."""
    return np.mean(scores, (-2, -1))


def over_seeds(scores: Scores, aggregate: Aggregate) -> Interval:
    """Aggregate a method's scores, with an interval over seeds and episodes.

    Bounds are NaN below `INTERVAL_FROM` seeds, or if a resample has no score.
    """
    value = float(aggregate(scores.points))
    if scores.seeds < INTERVAL_FROM:
        return Interval(value)
    return percentile_interval(value, aggregate(scores.resampled()))


def this_policy_only(scores: Scores, aggregate: Aggregate) -> Interval:
    """Aggregate a method's scores, with an interval over these runs' episodes only."""
    value = float(aggregate(scores.points))
    return percentile_interval(value, aggregate(scores.resamples))


def improvement(first: Scores, second: Scores) -> Interval:
    """Estimate the probability that a run of one method outscores one of another.

    Bounds are NaN if either has fewer than `INTERVAL_FROM` seeds, or a resample has no
    score.
    """
    value = float(probability_of_improvement(first.points, second.points))
    if min(first.seeds, second.seeds) < INTERVAL_FROM:
        return Interval(value)
    resampled = probability_of_improvement(first.resampled(), second.resampled())
    return percentile_interval(value, resampled)


class Ranking(NamedTuple):
    """Names and interquartile means of methods, best first.

    ``refusal`` says why they are not ranked; empty if they are.
    """

    places: list[tuple[str, Interval]]
    refusal: str = ""


def rank(methods: Mapping[str, Scores]) -> Ranking:
    """Rank methods by their interquartile mean over seeds and conditions.

    All scores must be under the same conditions. If any method has fewer than
    `RANKED_FROM` seeds, or a score that is NaN, the methods keep their order.
    """
    places = [
        (name, over_seeds(scores, interquartile_score))
        for name, scores in methods.items()
    ]
    fewest = min(scores.seeds for scores in methods.values())
    if fewest < RANKED_FROM:
        seeds = "1 seed" if fewest == 1 else f"{fewest} seeds"
        reason = f"a method has only {seeds}, and a ranking needs {RANKED_FROM}"
        return Ranking(places, f"Not ranked: {reason}.")
    if unscored := [name for name, place in places if np.isnan(place.value)]:
        reason = f"a score of {', '.join(unscored)} is undefined"
        return Ranking(places, f"Not ranked: {reason}.")
    return Ranking(sorted(places, key=lambda place: -place[1].value))
