"""The learning rate over a fold, and when to go back to better weights."""

import math
from collections.abc import Sequence

from marl_pool.training.supervised.settings import Decay, FitSettings

DROP_AT, DROP_TO = 0.7, 0.1
"""The share of the steps after which ``decay=drop`` lowers the rate, and how far:
SWARM, section 4.2."""
BETA, ALPHA, FIRST_EPOCHS = 0.2, 0.9, 5
"""Back-tracking: the share of the epochs that must be worse, what the learning rate is
multiplied by, and the number of epochs that is never enough. SWARM, section 4.1.3."""


def lr_at(progress: float, settings: FitSettings) -> float:
    """The learning rate when a share ``progress``, in [0, 1], of a fold is over."""
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
    """Return whether training goes back to the weights of the best epoch.

    With e epochs before the current one it does after more than ``max(β e, 5)`` epochs
    in a row were no worse than the current one.

    Source: the published code of SWARM. The text (section 4.1.3) differs a little:
    there the epochs have to be better, more than β of all, and only the first five
    epochs are exempt.

    Args:
        losses: of validation, an epoch each, the current one last; for an epoch after
            which training went back, the best loss until then.
    """
    *before, current = losses
    no_worse = 0
    for loss in reversed(before):
        if loss > current:
            break
        no_worse += 1
    return no_worse > max(BETA * len(before), FIRST_EPOCHS)
