"""Returns made comparable: scores between a random policy and a scripted one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from marl_pool.evaluation.results import CLEAN, WORLD, Area, Result
from marl_pool.evaluation.statistics.intervals import Interval, around, episode_draws

RANDOM, HEURISTIC = "random", "heuristic"


@dataclass(frozen=True)
class NormalizationBaselines:
    """What 0 and 1 are in one world, for one group of agents.

    Attributes:
        random: ``(episodes,)`` returns of the random policy.
        heuristic: the same of the scripted one.
    """

    random: np.ndarray
    heuristic: np.ndarray


def normalized(
    returns: np.ndarray, yardstick: NormalizationBaselines, *, seed: int = 0
) -> Interval:
    """Score returns: 0 is the random policy's mean, 1 is the scripted one's.

    Raw returns cannot be compared between worlds, and shares of negative ones mean
    nothing. The interval is over episodes, so for *this policy only*: all three
    samples are resampled together, world by world, so that it holds the error of the
    yardstick too. Where some resample leaves no yardstick (`score_of`) there is none.

    Source: normalised scores as of Agarwal et al. (2021), with a scripted policy in
    place of a human's score.

    Args:
        returns: ``(episodes,)`` in the worlds of the yardstick.
        yardstick: of the unperturbed world.
        seed: of the bootstrap.
    """
    sample = np.stack([returns, yardstick.random, yardstick.heuristic], 1)
    count = len(sample)
    if count < 2:
        return Interval(float(score_of(sample.mean(0))), np.nan, np.nan)
    # How often each episode is drawn is all that a mean needs.
    weights = episode_draws(count, seed=seed)
    return around(float(score_of(sample.mean(0))), score_of(weights @ sample))


def score_of(means: np.ndarray) -> np.ndarray:
    """The scores of mean returns; NaN where the scripted policy is not the better one.

    Args:
        means: ``(..., 3)``: of the policy, the random one and the scripted one.
    """
    played, random, heuristic = np.moveaxis(means, -1, 0)
    width = np.where(heuristic > random, heuristic - random, np.nan)
    score: np.ndarray = (played - random) / width
    return score


def scored(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[Result]:
    """Fill in the scores of rows whose world has a random and a scripted policy.

    Several groups that learn have none: what one's baseline gets depends on how
    another's plays.

    Args:
        results: the rows.
        returns: ``(rows, episodes)``.
        seed: of the bootstrap.
    """
    yardsticks = _yardsticks(results, returns)
    rows = []
    for row, own in zip(results, returns, strict=True):
        yardstick = yardsticks.get(_world_of(row))
        if yardstick is not None and not row.gap:
            score, low, high = normalized(own, yardstick, seed=seed)
            row = replace(row, score=score, score_low=low, score_high=high)
        rows.append(row)
    return rows


def areas_of(
    results: Sequence[Result], returns: np.ndarray, *, seed: int = 0
) -> list[Area]:
    """One number for each ladder of severities; see `Area`.

    Args:
        results: the rows.
        returns: ``(rows, episodes)``.
        seed: of the bootstrap.
    """
    yardsticks = _yardsticks(results, returns)
    clean = {
        (row.group, row.policy, row.stochastic): own
        for row, own in zip(results, returns, strict=True)
        if row.perturbation == CLEAN
    }
    areas = []
    for ladder in _ladders(results):
        first = results[ladder[0]]
        key = (first.group, first.policy, first.stochastic)
        rungs = {0.0: clean[key]}
        rungs |= {results[place].severity: returns[place] for place in ladder}
        severities = sorted(rungs)
        area: dict[str, Any] = {}
        yardstick = yardsticks.get(_world_of(first))
        gap = any(results[place].gap for place in ladder)
        if yardstick is not None and not gap and severities[-1] > 0:
            mean = mean_over([rungs[severity] for severity in severities], severities)
            value, low, high = normalized(mean, yardstick, seed=seed)
            area = {"area": value, "area_low": low, "area_high": high}
        areas.append(
            Area(
                group=first.group,
                policy=first.policy,
                stochastic=first.stochastic,
                perturbation=first.perturbation,
                label=first.label,
                options=first.options,
                severities=severities,
                **area,
            )
        )
    return areas


def mean_over(rungs: Sequence[np.ndarray], severities: Sequence[float]) -> np.ndarray:
    """The mean over severity by the trapezoidal rule, for each episode.

    Args:
        rungs: ``(episodes,)`` for each severity.
        severities: increasing, two or more.
    """
    length = severities[-1] - severities[0]
    mean: np.ndarray = np.trapezoid(np.stack(rungs), severities, axis=0) / length
    return mean


def _world_of(row: Result) -> tuple[str, str]:
    return row.group, row.label if row.perturbation == WORLD else CLEAN


def _yardsticks(
    results: Sequence[Result], returns: np.ndarray
) -> Mapping[tuple[str, str], NormalizationBaselines]:
    learning = {row.group for row in results if not row.fixed}
    if len(learning) != 1:
        return {}
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for row, own in zip(results, returns, strict=True):
        if row.policy in (RANDOM, HEURISTIC) and not row.gap and not row.fixed:
            found.setdefault(_world_of(row), {})[row.policy] = own
    return {
        env: NormalizationBaselines(pair[RANDOM], pair[HEURISTIC])
        for env, pair in found.items()
        if len(pair) == 2
    }


def _ladders(results: Sequence[Result]) -> list[list[int]]:
    """The places of the rows of each perturbation, by its options."""
    ladders: dict[tuple[str, str, bool, str], list[int]] = {}
    for place, row in enumerate(results):
        if row.perturbed:
            key = (row.group, row.policy, row.stochastic, row.label)
            ladders.setdefault(key, []).append(place)
    return list(ladders.values())
