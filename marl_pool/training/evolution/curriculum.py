"""Curriculum: environment options that change during evolution."""

from collections.abc import Mapping, Sequence
from typing import Any

from marl_pool.utils import names
from marl_pool.utils.errors import InputError

Curriculum = Mapping[str, Sequence[float]]
"""Option of the environment → its values at the start and at the end."""


def check_options(
    env: Mapping[str, Any],
    curriculum: Curriculum,
    fitness_env: Mapping[str, Any] | None = None,
) -> None:
    """Reject keys that are no numeric options, or that ``fitness_env`` sets as well."""
    # Flags are integers in Python, but no quantities.
    numbers = [
        key
        for key, value in env.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    for key in curriculum:
        if key not in numbers:
            raise names.unknown("key of curriculum", key, numbers)
        if fitness_env and key in fitness_env:
            raise InputError(
                f"curriculum.{key}: expected an option that fitness_env leaves alone, "
                f"got one that it sets to {fitness_env[key]!r}"
            )


def env_at(
    env: Mapping[str, Any], curriculum: Curriculum, progress: float
) -> dict[str, Any]:
    """Return the options at a point of the curriculum; integers are rounded.

    Args:
        env: ``{"name": …, **options}`` of the environment.
        curriculum: options that change.
        progress: completed fraction of the curriculum; values above 1 count as 1.
    """
    progress = min(progress, 1.0)
    changed = dict(env)
    for key, (start, end) in curriculum.items():
        # Not start + progress · (end - start), which may miss the end by rounding.
        value = (1 - progress) * start + progress * end
        changed[key] = round(value) if isinstance(env[key], int) else value
    return changed
