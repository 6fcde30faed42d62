"""Scores and AUCs against hand-computed values, and when they are undefined."""

from dataclasses import replace

import numpy as np
import pytest

from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER, Result
from marl_pool.evaluation.statistics import intervals
from marl_pool.evaluation.statistics.scores import (
    HEURISTIC,
    RANDOM,
    NormalizationBaselines,
    mean_over,
    normalized,
    scored,
    severity_aucs,
)

OFFSETS = np.array([0.0, 1.0, 2.0, 3.0])
BASELINES = NormalizationBaselines(random=OFFSETS - 10, heuristic=OFFSETS)


def row(policy: str = TRAINED, name: str = CLEAN, **options: object) -> Result:
    plain = Result("agent", policy, False, name, options.pop("label", name), 0.0)  # type: ignore[arg-type]
    return replace(plain, **options)  # type: ignore[arg-type]


def test_a_score_is_the_place_between_random_and_heuristic() -> None:
    assert normalized(OFFSETS - 10, BASELINES).value == 0.0
    assert normalized(OFFSETS, BASELINES).value == 1.0
    assert normalized(OFFSETS - 5, BASELINES).value == pytest.approx(0.5)
    assert normalized(OFFSETS + 10, BASELINES).value == pytest.approx(2.0)


def test_differences_between_environments_cancel_in_the_interval() -> None:
    """Every environment gives a score of 0.5, and so does every resample."""
    value, low, high = normalized(OFFSETS - 5, BASELINES)
    assert low == pytest.approx(value)
    assert high == pytest.approx(value)
    assert normalized(OFFSETS[::-1] - 5, BASELINES).low < 0.5


def test_an_interval_is_that_of_a_plain_bootstrap() -> None:
    generator = np.random.default_rng(3)
    policy_returns, random, heuristic = generator.normal(
        [[-1.0], [-4.0], [0.0]], 1, (3, 200)
    )
    draws = np.random.default_rng(4).integers(200, size=(4000, 200))
    means = [sample[draws].mean(1) for sample in (policy_returns, random, heuristic)]
    scores = (means[0] - means[1]) / (means[2] - means[1])
    baselines = NormalizationBaselines(random, heuristic)
    interval = normalized(policy_returns, baselines, seed=1)
    assert interval[1:] == pytest.approx(np.percentile(scores, (2.5, 97.5)), abs=0.02)


def test_blocks_of_resamples_give_the_same_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returns, random, heuristic = np.random.default_rng(3).normal(
        [[-1.0], [-4.0], [0.0]], 1, (3, 50)
    )
    baselines = NormalizationBaselines(random, heuristic)
    expected = normalized(returns, baselines)
    monkeypatch.setattr(intervals, "BLOCK", 170)
    # A product of fewer rows may sum in another order.
    assert normalized(returns, baselines) == pytest.approx(expected, rel=1e-12)


def test_rows_are_scored_by_the_baselines_of_their_environment() -> None:
    transfer = {"name": TRANSFER, "label": "1-1-30"}
    rows = [row(), row(name="jitter", severity=0.5), row(RANDOM), row(HEURISTIC)]
    rows += [row(policy, **transfer) for policy in (TRAINED, RANDOM, HEURISTIC)]
    means = [-5.0, -7.5, -10.0, 0.0, -5.0, -20.0, -10.0]
    returns = np.array(means)[:, None] + OFFSETS
    values = [result.score for result in scored(rows, returns)]
    assert values == pytest.approx([0.5, 0.25, 0.0, 1.0, 1.5, 0.0, 1.0])


@pytest.mark.parametrize(
    "rows",
    [
        [row(), row(RANDOM)],
        [row(), row(HEURISTIC)],
        [row(), row(RANDOM), row(HEURISTIC, missing="it cannot play")],
        [row(), row(RANDOM), row(HEURISTIC), row(group="other")],
        [row(), row(HEURISTIC), row(RANDOM)],  # returns rise: the heuristic is worse
    ],
    ids=["no heuristic", "no random", "gap", "two groups", "worse than random"],
)
def test_without_baselines_there_is_no_score(rows: list[Result]) -> None:
    returns = np.arange(len(rows))[:, None] + OFFSETS
    assert np.isnan([result.score for result in scored(rows, returns)]).all()


def test_a_group_that_did_not_learn_leaves_the_others_score() -> None:
    rows = [row(), row(RANDOM), row(HEURISTIC), row(group="prey", fixed=True)]
    returns = np.array([[-5.0], [-10.0], [0.0], [3.0]]) + OFFSETS
    scores = [result.score for result in scored(rows, returns)]
    assert scores[:3] == pytest.approx([0.5, 0.0, 1.0])
    assert np.isnan(scores[3])


def levels(*severities: float, **options: object) -> list[Result]:
    return [row(name="jitter", severity=s, **options) for s in severities]


def test_an_auc_is_the_mean_over_severity() -> None:
    rows = [row(), row(RANDOM), row(HEURISTIC), *levels(1.0, 0.5)]
    # Scores 1 clean, 0.5 at 0.5 and 0 at 1.
    returns = np.array([0.0, -10.0, 0.0, -10.0, -5.0])[:, None] + OFFSETS
    (auc,) = severity_aucs(rows, returns)
    assert auc.severities == [0.0, 0.5, 1.0]
    assert auc.auc == pytest.approx(0.5)
    assert (auc.label, auc.policy) == ("jitter", TRAINED)


def test_a_mean_over_severity_is_the_trapezoidal_rules_per_range() -> None:
    falling = [np.array([1.0]), np.array([0.5]), np.array([0.0])]
    assert mean_over(falling, [0.0, 0.2, 1.0]) == pytest.approx(0.15 + 0.2)
    # The length of the range does not matter.
    assert mean_over(falling, [0.0, 0.1, 0.2]) == pytest.approx(0.5)


def test_each_perturbation_and_each_way_to_act_has_an_auc() -> None:
    rows = [row(), row(stochastic=True), row(RANDOM), row(HEURISTIC), *levels(0.5)]
    rows += levels(0.5, stochastic=True) + levels(0.5, label="jitter scale=2")
    returns = np.array([0.0, -2.0, -10.0, 0.0, -5.0, -6.0, -10.0])[:, None] + OFFSETS
    aucs = severity_aucs(rows, returns)
    assert [(a.label, a.stochastic) for a in aucs] == [
        ("jitter", False),
        ("jitter", True),
        ("jitter scale=2", False),
    ]
    # The mean of the scores at both ends; each way to act has separate clean scores.
    assert [a.auc for a in aucs] == pytest.approx([0.75, 0.6, 0.5])


def test_a_missing_level_leaves_no_auc() -> None:
    rows = [row(), row(RANDOM), row(HEURISTIC), *levels(0.5)]
    rows += levels(1.0, missing="no")
    returns = np.array([0.0, -10.0, 0.0, -5.0, np.nan])[:, None] + OFFSETS
    (auc,) = severity_aucs(rows, returns)
    assert np.isnan(auc.auc)
    assert auc.severities == [0.0, 0.5, 1.0]


def test_no_level_but_zero_has_no_auc() -> None:
    rows = [row(), row(RANDOM), row(HEURISTIC), *levels(0.0)]
    returns = np.array([0.0, -10.0, 0.0, 0.0])[:, None] + OFFSETS
    assert np.isnan(severity_aucs(rows, returns)[0].auc)


@pytest.mark.parametrize("score", [0.0, -1.0])
def test_an_interval_without_bounds_is_none(score: float) -> None:
    """In three of four environments the heuristic is no better than random."""
    heuristic = np.array([score, score, score, 4.0 - 3 * score])
    baselines = NormalizationBaselines(np.zeros(4), heuristic)
    value, low, high = normalized(np.full(4, 0.5), baselines)
    assert value == pytest.approx(0.5)
    assert np.isnan([low, high]).all()


def test_one_episode_has_no_interval() -> None:
    baselines = NormalizationBaselines(np.array([0.0]), np.array([2.0]))
    value, low, high = normalized(np.array([1.0]), baselines)
    assert value == 0.5
    assert np.isnan([low, high]).all()
