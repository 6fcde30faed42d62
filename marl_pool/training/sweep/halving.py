"""Early stopping of a search's trials, by asynchronous successive halving (ASHA).

A trial is compared with the other runs in its sweep's folder, whichever process or
session trained them.

Source: Li et al. (2020), A System for Massively Parallel Hyperparameter Tuning,
https://arxiv.org/abs/1810.05934, without the paper's pauses: a stopped trial never
continues.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from marl_pool.options import names
from marl_pool.runs.run import CONFIG, Run
from marl_pool.training.jobs import JOBS, Row, config_of
from marl_pool.training.settings import RunConfig
from marl_pool.utils.errors import InputError

RUNGS, WHOLE = (10, 30, 90), 100
"""Percentages of training at which a trial may be stopped, and of a finished one."""
REDUCTION = 3
"""A trial goes on in the best third of those that came to its rung before it."""


@dataclass
class EarlyStopping:
    """Decision on when a trial of a search stops early.

    Attributes:
        metric: column of the metrics, with a minus in front if lower is better.
        enabled: False to stop only trials without the metric.
        config: configuration of the trial.
        was_worse: True once the trial was stopped because others were better.
    """

    metric: str
    enabled: bool
    config: RunConfig
    was_worse: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._percentage = percentage(self.config)
        self._compared_at = -1

    def should_stop(self, run: Run) -> bool:
        """Return True to stop; called before each iteration."""
        row = run.metrics.last
        # A session may begin after the row to compare.
        if not row and (rows := run.metrics.readable_rows()):
            row = rows[-1]
        if not row:
            return False
        if self.metric.removeprefix("-") not in row:
            return True
        done = self._percentage(row)
        if self.enabled and done not in (self._compared_at, WHOLE):
            rows = run.metrics.readable_rows()
            if score_of(rows, self.metric) is not None:
                self._compared_at = done
                self.was_worse = self._is_worse(run, rows)
        return self.was_worse

    def _is_worse(self, run: Run, rows: Sequence[Row]) -> bool:
        """Compare the best score so far, if the last row is the first of a rung."""
        previous, current = (
            rung_scores(part, self.metric, self._percentage)
            for part in (rows[:-1], rows)
        )
        for rung in current.keys() - previous.keys():
            rivals = [
                scores[rung]
                for path in run.path.parent.iterdir()
                if path != run.path
                if rung in (scores := _scores_in(path, self.metric))
            ]
            if rivals:
                threshold = np.percentile(rivals, 100 * (1 - 1 / REDUCTION))
                return bool(current[rung] < threshold)
        return False


def rung_scores(
    rows: Sequence[Row], metric: str, percentage: Callable[[Row], int]
) -> dict[int, float]:
    """Return the best score so far at the first row of each rung.

    A rung ends where the next one begins, so that a late row enters no early
    comparison. Rows before the first finite score are skipped.
    """
    scores = dict[int, float]()
    for row, score in zip(rows, scores_so_far(rows, metric), strict=True):
        done = percentage(row)
        if score is not None and done >= RUNGS[0]:
            scores.setdefault(max(rung for rung in RUNGS if rung <= done), score)
    return scores


def score_of(
    rows: Sequence[Row], metric: str, *, has_ended: bool = False
) -> float | None:
    """Return the last of `scores_so_far`; None without rows."""
    *_, score = (None, *scores_so_far(rows, metric, has_ended=has_ended))
    return score


def scores_so_far(
    rows: Sequence[Row], metric: str, *, has_ended: bool = False
) -> Iterator[float | None]:
    """Yield the best value of a metric up to each row; None before a finite one.

    For a fit this is the mean over folds of the best value of each, because folds
    validate different examples. A fold counts when the next one begins, when the run
    ends, or when it has as many epochs as the first one, which counts at once.

    Args:
        rows: rows of ``metrics.csv``.
        metric: a column; with a minus in front its values are negated.
        has_ended: the run is finished, so that its last row ends a fold.

    Raises:
        InputError: the rows have no such column.
    """
    sign, column = (-1, metric[1:]) if metric.startswith("-") else (1, metric)
    # By fold; runs other than fits have none.
    best, epochs = dict[Any, float](), Counter[Any]()
    for number, row in enumerate(rows, 1):
        if column not in row:
            raise names.unknown("sweep.metric", column, row)
        value, fold = sign * float(row[column]), row.get("fold")
        if math.isfinite(value):
            best[fold] = max(value, best.get(fold, -math.inf))
        epochs[fold] += 1
        is_short = epochs[fold] < next(iter(epochs.values()))
        # A limit of seconds may end the last fold early.
        is_short = is_short and not (has_ended and number == len(rows))
        scores = [best[name] for name in best if name != fold or not is_short]
        yield fmean(scores) if scores else None


def percentage(config: RunConfig) -> Callable[[Row], int]:
    """Return a function that maps a row to the percentage of training completed."""
    job = JOBS[config.verb]
    total = job.total(config)
    return lambda row: min(WHOLE, WHOLE * job.count(row, config) // total)


def _scores_in(path: Path, metric: str) -> dict[int, float]:
    """Return the scores of a run at the rungs; none for a run that cannot be read."""
    with suppress(InputError):
        if (path / CONFIG).is_file():
            run = Run.open(path)
            done = percentage(config_of(run))
            return rung_scores(run.metrics.readable_rows(), metric, done)
    return {}
