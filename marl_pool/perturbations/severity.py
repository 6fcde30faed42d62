"""Severity of a perturbation: fixed, or sampled for each episode."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform

SEVERITY_POSITION = -1
"""Position in a perturbation's stream; its other numbers begin at 0."""


def validate_no_ramp(options: Mapping[str, Any], why: str) -> None:
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
        ramp: episodes over which the severity grows from 0 to the sampled one.
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
