"""Validation of environment options, and the shared notation of entity counts."""

import math
from collections.abc import Mapping
from typing import Any

from marl_pool.utils.errors import InputError


def validate_number(key: str, value: float, fits: bool, expected: str) -> None:
    """Reject a number that is out of range, infinite or NaN.

    Args:
        key: name of the option.
        value: the value passed.
        fits: True if the value is in range.
        expected: the range in words.

    Raises:
        InputError: the value is out of range or not finite.
    """
    if not (fits and math.isfinite(value)):
        raise InputError(f"env.{key}: expected {expected}, got {value}")


def entity_counts(
    counts: str, given: Mapping[str, int | None], least: tuple[int, ...]
) -> tuple[int, ...]:
    """Parse the numbers of entities, in the notation of the AdaPool paper.

    Args:
        counts: one number a kind, joined by hyphens: ``"1-3-28"``.
        given: by option, in the order of ``counts``: a number that overrides its part
            of ``counts``, or None to keep the part.
        least: lower bound of each number.

    Returns:
        The numbers, in the same order.

    Raises:
        InputError: a wrong number of parts, or a number below its bound.
    """
    parts = counts.split("-") if isinstance(counts, str) else []
    if len(parts) != len(given) or not all(part.isdecimal() for part in parts):
        form = "-".join(key.removeprefix("num_") for key in given)
        raise InputError(f"env.counts: expected {form}, such as 1-3-28, got {counts!r}")
    numbers = []
    for part, (key, number), lowest in zip(parts, given.items(), least, strict=True):
        overridden = number is not None
        number = number if overridden else int(part)
        if not isinstance(number, int) or number < lowest:
            where = key if overridden else f"counts: {key}"
            shown = number if overridden else counts
            raise InputError(
                f"env.{where}: expected an integer >= {lowest}, got {shown!r}"
            )
        numbers.append(number)
    return tuple(numbers)


def expand_counts(env_config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``counts`` by the numbers that it abbreviates.

    Two spellings of one environment become equal, so that runs can be compared.

    Args:
        env_config: ``{"name": …, **options}`` with all options.
    """
    options = dict(env_config)
    numbers = [key for key in options if key.startswith("num_")]
    parts = str(options.get("counts", "")).split("-")
    if len(parts) == len(numbers) and all(part.isdecimal() for part in parts):
        for key, part in zip(numbers, parts, strict=True):
            options[key] = int(part) if options[key] is None else options[key]
        del options["counts"]
    return options
