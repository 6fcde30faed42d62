"""Learning rate schedule, and back-tracking to better weights."""

import math
from collections.abc import Sequence
from itertools import takewhile

from marl_pool.training.supervised.settings import Decay, FitSettings

DROP_AT, DROP_TO = 0.7, 0.1
"""Fraction of the steps after which ``decay=drop`` lowers the rate, and its factor:
SWARM, section 4.2."""
BETA, ALPHA, FIRST_EPOCHS = 0.2, 0.9, 5
"""Back-tracking: fraction β of the epochs that must be no worse, factor α of the
learning rate, and number of epochs that never suffices. SWARM, section 4.1.3."""


def lr_at(progress: float, settings: FitSettings) -> float:
    """Return the learning rate at a fraction ``progress`` in [0, 1] of a fold."""
    if progress < settings.warmup:
        return settings.lr * progress / settings.warmup
    rest = (progress - settings.warmup) / (1 - settings.warmup)
    return settings.lr * _factor(settings.decay, min(rest, 1.0))


def _factor(decay: Decay, progress: float) -> float:
    if decay == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if decay == "drop":
        return DROP_TO if progress >= DROP_AT else 1.0
    return 1.0


def must_go_back(losses: Sequence[float]) -> bool:
    """Decide on back-tracking to the weights of the best epoch.

    With e earlier epochs it is due if more than ``max(β e, 5)`` of the epochs directly
    before the current one were no worse than it.

    Source: the published code of SWARM (Vollgraf, https://arxiv.org/abs/1906.09400).
    The text (section 4.1.3) differs a little: there the epochs have to be better, more
    than β of all, and only the first five epochs are exempt.

    Args:
        losses: validation loss of each epoch, the current one last; for an epoch after
            which training returned to the best weights, their loss.
    """
    *earlier, current = losses
    no_worse = takewhile(lambda loss: loss <= current, reversed(earlier))
    return len(list(no_worse)) > max(BETA * len(earlier), FIRST_EPOCHS)
