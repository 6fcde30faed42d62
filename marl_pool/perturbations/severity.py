"""Severity of a perturbation: fixed, or sampled for each episode."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform

SEVERITY_POSITION = -1
"""Position in a perturbation's stream; its other numbers begin at 0."""


def check_severity(severity: float | Sequence[float]) -> tuple[float, float]:
    """Return the bounds of ``severity``, a number or a pair.

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
    """Reject a ramp where environments do not play one episode after another.

    Args:
        options: of the perturbation.
        why: reason for the message.

    Raises:
        InputError: the perturbation has a ramp.
    """
    if options.get("ramp") is not None:
        raise InputError(
            f"perturbation.ramp: expected null, since {why}, got {options['ramp']}"
        )


def sample_severities(
    bounds: tuple[float, float],
    keys: Tensor,
    ramp: int | None = None,
    episodes: Tensor | None = None,
) -> Tensor:
    """Sample the severity of each environment, uniform between the bounds.

    It comes from the environment's own stream, so that an environment has the same
    severity alone and in a batch, and other random numbers do not depend on the bounds.

    Args:
        bounds: low and high, in [0, 1].
        keys: ``(num_envs,)`` of the random streams.
        ramp: episodes of an environment in which its severity grows from 0 to the
            sampled one.
        episodes: ``(num_envs,)`` number of episodes that each environment has played;
            None: the ramp is over.

    Returns:
        ``(num_envs,)`` float64.
    """
    low, high = bounds
    if low == high:
        sampled = torch.full(keys.shape, low, dtype=torch.float64, device=keys.device)
    else:
        sampled = low + (high - low) * uniform(keys, 1, SEVERITY_POSITION)[:, 0]
    if ramp is None or episodes is None:
        return sampled
    return sampled * (episodes.double() / ramp).clamp(max=1)
