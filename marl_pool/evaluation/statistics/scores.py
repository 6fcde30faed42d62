"""Normalized scores: 0 is the random policy, 1 the scripted one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from marl_pool.evaluation.results import CLEAN, TRANSFER, Result, SeverityAUC
from marl_pool.evaluation.statistics.intervals import (
    Interval,
    around,
    episode_resamples,
)

RANDOM, HEURISTIC = "random", "heuristic"


class NormalizationBaselines(NamedTuple):
    """``(episodes,)`` returns of the policies that score 0 and 1 in one environment."""

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
        seed: of the bootstrap.
    """
    sample = np.stack([returns, *baselines], 1)
    score = float(score_of(sample.mean(0)))
    if len(sample) < 2:
        return Interval(score, np.nan, np.nan)
    # A resample enters a mean by the counts of its episodes alone.
    return around(score, score_of(episode_resamples(len(sample), seed=seed) @ sample))


def score_of(means: np.ndarray) -> np.ndarray:
    """Score mean returns; NaN where the scripted policy is not the better baseline.

    Args:
        means: ``(..., 3)``, of the policy, the random and the scripted one.
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
        seed: of the bootstrap.
    """
    baselines = _baselines(results, returns)
    rows = []
    for row, own in zip(results, returns, strict=True):
        pair = baselines.get(_env_key(row))
        if pair and not row.missing:
            score, low, high = normalized(own, pair, seed=seed)
            row = replace(row, score=score, score_low=low, score_high=high)
        rows.append(row)
    return rows


def severity_aucs(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[SeverityAUC]:
    """Average the score over the severities of each perturbation.

    Args:
        results: rows.
        returns: ``(rows, episodes)``.
        seed: of the bootstrap.
    """
    # Sort the rows into clean and perturbed ones of each policy.
    baselines = _baselines(results, returns)
    clean: dict[tuple[Any, ...], np.ndarray] = {}
    perturbed: dict[tuple[Any, ...], list[tuple[Result, np.ndarray]]] = {}
    for row, own in zip(results, returns, strict=True):
        policy = (row.group, row.policy, row.stochastic)
        if row.perturbation == CLEAN:
            clean[policy] = own
        elif row.perturbed:
            perturbed.setdefault((*policy, row.label), []).append((row, own))
    aucs = []
    for key, rows in perturbed.items():
        first = rows[0][0]
        # Clean episodes are the level at severity 0.
        levels = {0.0: clean[key[:-1]]} | {row.severity: own for row, own in rows}
        # An AUC needs baselines and a result at every severity.
        severities = sorted(levels)
        auc = Interval(np.nan, np.nan, np.nan)
        pair = baselines.get(_env_key(first))
        if pair and not any(row.missing for row, _ in rows) and severities[-1] > 0:
            mean = mean_over([levels[severity] for severity in severities], severities)
            auc = normalized(mean, pair, seed=seed)
        names = ("group", "policy", "stochastic", "perturbation", "label", "options")
        about: dict[str, Any] = {name: getattr(first, name) for name in names}
        about |= zip(("auc", "auc_low", "auc_high"), auc, strict=True)
        aucs.append(SeverityAUC(**about, severities=severities))
    return aucs


def mean_over(levels: Sequence[np.ndarray], severities: Sequence[float]) -> np.ndarray:
    """Average over severity by the trapezoidal rule, for each episode.

    Args:
        levels: ``(episodes,)`` returns at each severity.
        severities: increasing, two or more.
    """
    area: np.ndarray = np.trapezoid(np.stack(levels), severities, axis=0)
    return area / (severities[-1] - severities[0])


def _env_key(row: Result) -> tuple[str, str]:
    return row.group, row.label if row.perturbation == TRANSFER else CLEAN


def _baselines(
    results: Sequence[Result], returns: np.ndarray
) -> dict[tuple[str, str], NormalizationBaselines]:
    """Collect the baselines of each environment that has both, by `_env_key`."""
    if len({row.group for row in results if not row.fixed}) != 1:
        return {}
    known = {
        (_env_key(row), row.policy): own
        for row, own in zip(results, returns, strict=True)
        if not row.missing and not row.fixed
    }
    return {
        env: NormalizationBaselines(known[env, RANDOM], known[env, HEURISTIC])
        for env, policy in known
        if policy == RANDOM and (env, HEURISTIC) in known
    }
