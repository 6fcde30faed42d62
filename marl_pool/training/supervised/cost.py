"""What a run will cost, reckoned from a few of its batches."""

from collections.abc import Sequence
from typing import NamedTuple

from marl_pool.training.supervised.folds import Fold
from marl_pool.training.supervised.learner import Learner, Measured

BATCHES = 2
"""That are measured of each epoch, after one that is not: the first is slower."""


class Cost(NamedTuple):
    """An estimate; as text it is a line for people.

    Attributes:
        folds: how many.
        epochs: of each, at most.
        examples: that an epoch learns from.
        rate: examples learned from in a second.
        seconds: of the whole run.
    """

    folds: int
    epochs: int
    examples: int
    rate: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"about {duration(self.seconds)}: {self.folds} "
            f"fold{'s' if self.folds > 1 else ''} of at most {self.epochs} epochs of "
            f"{self.examples:,} examples, {self.rate:,.0f} examples/s"
        )


def estimate(learner: Learner, rows: Fold, num_test: int) -> Cost:
    """Measure a few batches, and reckon what the whole run takes.

    They are of the first, the middle and the last epoch: a task may have a schedule,
    and a merging network that goes deeper epoch by epoch becomes slower.

    Args:
        learner: of a fold; it is not used afterwards.
        rows: of the fold.
        num_test: examples of the test set.
    """
    settings, size = learner.settings, learner.settings.batch_size
    learner.learn(rows.train[:size])
    learned, measured = [], []
    for epoch in (0, settings.epochs // 2, settings.epochs - 1):
        learner.losses = [0.0] * epoch
        learned.append(learner.learn(rows.train[: BATCHES * size]))
        measured.append(learner.measure("train", rows.validation[: BATCHES * size]))
    each, looked = _seconds_each(learned), _seconds_each(measured)
    an_epoch = each * len(rows.train)
    training, epochs = an_epoch * settings.epochs, float(settings.epochs)
    if settings.seconds_per_fold is not None and training > settings.seconds_per_fold:
        training = settings.seconds_per_fold
        epochs = training / an_epoch
    measuring = looked * (len(rows.validation) * epochs + num_test)
    whole = settings.folds * (training + measuring)
    return Cost(settings.folds, settings.epochs, len(rows.train), 1 / each, whole)


def _seconds_each(pieces: Sequence[Measured]) -> float:
    return sum(part.seconds / part.examples for part in pieces) / len(pieces)


def duration(seconds: float) -> str:
    """Seconds in words of a fitting size."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
