"""How strong a perturbation is: the same everywhere, or drawn for each episode."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.randomness import uniform

PLACE = -1
"""In a perturbation's stream; its other numbers begin at 0."""


def check_severity(severity: float | Sequence[float]) -> tuple[float, float]:
    """The bounds that ``severity``, a number or a pair, stands for.

    Raises:
        InputError: no number, one out of range, or a pair in the wrong order.
    """
    if isinstance(severity, str) or not isinstance(severity, Sequence):
        if not (_is_number(severity) and 0 <= severity <= 1):
            raise InputError(
                f"perturbation.severity: expected a number in [0, 1], got {severity!r}"
            )
        return severity, severity
    pair = list(severity)
    numbers = len(pair) == 2 and all(map(_is_number, pair))
    if not (numbers and 0 <= pair[0] <= pair[1] <= 1):
        raise InputError(
            "perturbation.severity: expected [low, high], two numbers in [0, 1], "
            f"got {pair}"
        )
    return pair[0], pair[1]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_ramp(options: Mapping[str, Any], why: str) -> None:
    """Refuse a perturbation with a ramp where it could not grow.

    Args:
        options: of the perturbation.
        why: what there is instead of one episode after another.

    Raises:
        InputError: it has a ramp.
    """
    if options.get("ramp") is not None:
        raise InputError(
            f"perturbation.ramp: expected null, since {why}, got {options['ramp']}"
        )


def draw_severities(
    bounds: tuple[float, float],
    keys: Tensor,
    ramp: int | None = None,
    episodes: Tensor | None = None,
) -> Tensor:
    """Draw each world's severity, uniform between the bounds.

    It is a number of the world's own stream, so that a world draws the same one alone
    and among others, and what else is drawn does not change with the bounds.

    Args:
        bounds: low and high, in [0, 1].
        keys: ``(num_envs,)`` of the random streams.
        ramp: episodes of a world in which its severity grows from 0 to what was drawn.
        episodes: ``(num_envs,)`` how many episodes each world has played before; None
            for severities that have grown already.

    Returns:
        ``(num_envs,)`` float64.
    """
    low, high = bounds
    if low == high:
        drawn = torch.full(keys.shape, low, dtype=torch.float64, device=keys.device)
    else:
        drawn = low + (high - low) * uniform(keys, 1, PLACE)[:, 0]
    if ramp is None or episodes is None:
        return drawn
    return drawn * (episodes.double() / ramp).clamp(max=1)
