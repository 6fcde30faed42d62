"""Cost of a run, estimated from a few of its batches."""

from collections.abc import Sequence
from typing import NamedTuple

from marl_pool.training.supervised.learner import EpochMetrics, FoldLearner

BATCHES = 2
"""Batches to time in each epoch, after a first one for warm-up."""


class Cost(NamedTuple):
    """Estimated cost of a run; ``str`` gives one line."""

    folds: int
    epochs: int
    """Epochs of each fold, at most."""
    examples: int
    """Training examples of an epoch."""
    rate: float
    """Training examples per second."""
    seconds: float
    """Duration of the whole run."""

    def __str__(self) -> str:
        return (
            f"about {duration(self.seconds)}: {self.folds} "
            f"fold{'s' if self.folds > 1 else ''} of at most {self.epochs} epochs of "
            f"{self.examples:,} examples, {self.rate:,.0f} examples/s"
        )


def estimate(learner: FoldLearner) -> Cost:
    """Time a few batches, and extrapolate to the whole run.

    Batches of the first, the middle and the last epoch are timed, because a schedule
    may change the cost: a merging network becomes deeper, and slower, by the epoch.
    The learner is unusable afterwards.
    """
    settings, rows, size = learner.settings, learner.rows, learner.settings.batch_size
    # Warm up, then time.
    learner.learn(rows.train[:size])
    # Time the first, middle and last epoch: a schedule may change the cost.
    learned, measured = [], []
    for epoch in (0, settings.epochs // 2, settings.epochs - 1):
        learner.losses = [0.0] * epoch
        learned.append(learner.learn(rows.train[: BATCHES * size]))
        measured.append(learner.measure("train", rows.validation[: BATCHES * size]))
    each, measuring_each = _seconds_each(learned), _seconds_each(measured)
    # Extrapolate, at most to the limit of a fold.
    epoch_seconds = each * len(rows.train)
    training, epochs = epoch_seconds * settings.epochs, float(settings.epochs)
    if settings.seconds_per_fold is not None and training > settings.seconds_per_fold:
        training = settings.seconds_per_fold
        epochs = training / epoch_seconds
    # Add the validation after each epoch and the test at the end.
    measuring = measuring_each * (len(rows.validation) * epochs + learner.task.num_test)
    whole = settings.folds * (training + measuring)
    return Cost(settings.folds, settings.epochs, len(rows.train), 1 / each, whole)


def _seconds_each(epochs: Sequence[EpochMetrics]) -> float:
    return sum(each.seconds / each.examples for each in epochs) / len(epochs)


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
