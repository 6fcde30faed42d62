"""Worlds that become harder while evolution goes on."""

from collections.abc import Mapping, Sequence
from typing import Any

from marl_pool.utils import names
from marl_pool.utils.errors import InputError

Curriculum = Mapping[str, Sequence[float]]
"""Option of the env → its values at the start and at the end."""


def check_options(
    env: Mapping[str, Any],
    curriculum: Curriculum,
    fitness_env: Mapping[str, Any] | None = None,
) -> None:
    """Reject a key that is no numeric option of the env, or that has a value already.

    Args:
        env: ``{"name": …, **options}``.
        curriculum: the options that change.
        fitness_env: options that training sets to one value.

    Raises:
        InputError: there is such a key.
    """
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
    env: Mapping[str, Any], curriculum: Curriculum, share: float
) -> dict[str, Any]:
    """The options of training's worlds; whole numbers stay whole.

    Args:
        env: ``{"name": …, **options}``.
        curriculum: which of them change.
        share: of the curriculum that is done; from 1 on, all of it.
    """
    share = min(share, 1.0)
    changed = dict(env)
    for key, (start, end) in curriculum.items():
        # Not start + share · (end - start), which would miss the end by a rounding.
        value = (1 - share) * start + share * end
        changed[key] = round(value) if isinstance(env[key], int) else value
    return changed
