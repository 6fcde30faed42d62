"""Normalized scores: 0 is the random policy, 1 the scripted one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from marl_pool.evaluation.results import CLEAN, TRANSFER, Result, SeverityAUC
from marl_pool.evaluation.statistics.intervals import Interval, around, episode_draws

RANDOM, HEURISTIC = "random", "heuristic"


@dataclass(frozen=True)
class NormalizationBaselines:
    """Returns that score 0 and 1 in one environment, for one group of agents.

    Attributes:
        random: ``(episodes,)`` returns of the random policy.
        heuristic: ``(episodes,)`` returns of the scripted policy.
    """

    random: np.ndarray
    heuristic: np.ndarray


def normalized(
    returns: np.ndarray, baselines: NormalizationBaselines, *, seed: int = 0
) -> Interval:
    """Score returns: ``(mean - random) / (heuristic - random)``, with an interval.

    Raw returns cannot be compared between environments, and ratios of negative ones
    mean nothing. The interval is over episodes, so for *this policy only*. All three
    samples are resampled together, environment by environment, so that the interval
    includes the error of the baselines. It is NaN if the scripted policy is not the
    better one in some resample (`score_of`).

    Source: normalized scores of Agarwal et al. (2021,
    https://arxiv.org/abs/2108.13264), with a scripted policy in place of a human's
    score.

    Args:
        returns: ``(episodes,)`` in the environments of the baselines.
        baselines: returns in the unperturbed environments.
        seed: seed of the bootstrap.
    """
    sample = np.stack([returns, baselines.random, baselines.heuristic], 1)
    count = len(sample)
    if count < 2:
        return Interval(float(score_of(sample.mean(0))), np.nan, np.nan)
    # A resample enters a mean by the counts of its episodes alone.
    weights = episode_draws(count, seed=seed)
    return around(float(score_of(sample.mean(0))), score_of(weights @ sample))


def score_of(means: np.ndarray) -> np.ndarray:
    """Score mean returns; NaN where the scripted policy is not the better baseline.

    Args:
        means: ``(..., 3)`` mean returns of the policy, the random and the scripted one.

    Returns:
        ``(...)``.
    """
    policy, random, heuristic = np.moveaxis(means, -1, 0)
    width = np.where(heuristic > random, heuristic - random, np.nan)
    score: np.ndarray = (policy - random) / width
    return score


def scored(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[Result]:
    """Fill in the scores of rows whose environment has both baselines.

    Several groups that learn have no scores: a baseline's return in one group depends
    on the policy of another.

    Args:
        results: rows.
        returns: ``(rows, episodes)``.
        seed: seed of the bootstrap.
    """
    baselines = _baselines(results, returns)
    rows = []
    for row, own in zip(results, returns, strict=True):
        pair = baselines.get(_env_key(row))
        if pair is not None and not row.missing:
            score, low, high = normalized(own, pair, seed=seed)
            row = replace(row, score=score, score_low=low, score_high=high)
        rows.append(row)
    return rows


def severity_aucs(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[SeverityAUC]:
    """Return the mean score over the severities of each perturbation.

    Args:
        results: rows.
        returns: ``(rows, episodes)``.
        seed: seed of the bootstrap.
    """
    baselines = _baselines(results, returns)
    clean = {
        (row.group, row.policy, row.stochastic): own
        for row, own in zip(results, returns, strict=True)
        if row.perturbation == CLEAN
    }
    aucs = []
    for rows in _rows_of_perturbations(results):
        first = results[rows[0]]
        # Clean episodes are the level at severity 0.
        levels = {0.0: clean[first.group, first.policy, first.stochastic]}
        levels |= {results[row].severity: returns[row] for row in rows}
        severities = sorted(levels)
        numbers: dict[str, Any] = {}
        pair = baselines.get(_env_key(first))
        missing = any(results[row].missing for row in rows)
        if pair is not None and not missing and severities[-1] > 0:
            mean = mean_over([levels[severity] for severity in severities], severities)
            value, low, high = normalized(mean, pair, seed=seed)
            numbers = {"auc": value, "auc_low": low, "auc_high": high}
        aucs.append(
            SeverityAUC(
                group=first.group,
                policy=first.policy,
                stochastic=first.stochastic,
                perturbation=first.perturbation,
                label=first.label,
                options=first.options,
                severities=severities,
                **numbers,
            )
        )
    return aucs


def mean_over(levels: Sequence[np.ndarray], severities: Sequence[float]) -> np.ndarray:
    """Average over severity by the trapezoidal rule, for each episode.

    Args:
        levels: ``(episodes,)`` returns at each severity.
        severities: increasing, two or more.

    Returns:
        ``(episodes,)``.
    """
    length = severities[-1] - severities[0]
    mean: np.ndarray = np.trapezoid(np.stack(levels), severities, axis=0) / length
    return mean


def _env_key(row: Result) -> tuple[str, str]:
    return row.group, row.label if row.perturbation == TRANSFER else CLEAN


def _baselines(
    results: Sequence[Result], returns: np.ndarray
) -> Mapping[tuple[str, str], NormalizationBaselines]:
    """Return the baselines of each environment that has both, by `_env_key`."""
    learning = {row.group for row in results if not row.fixed}
    if len(learning) != 1:
        return {}
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for row, own in zip(results, returns, strict=True):
        if row.policy in (RANDOM, HEURISTIC) and not row.missing and not row.fixed:
            found.setdefault(_env_key(row), {})[row.policy] = own
    return {
        key: NormalizationBaselines(pair[RANDOM], pair[HEURISTIC])
        for key, pair in found.items()
        if len(pair) == 2
    }


def _rows_of_perturbations(results: Sequence[Result]) -> list[list[int]]:
    """Return the numbers of the rows of each perturbation with its options."""
    rows: dict[tuple[str, str, bool, str], list[int]] = {}
    for number, row in enumerate(results):
        if row.perturbed:
            key = (row.group, row.policy, row.stochastic, row.label)
            rows.setdefault(key, []).append(number)
    return list(rows.values())
