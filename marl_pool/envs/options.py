"""Checks of the worlds' options, and what several worlds read in the same way."""

import math
from collections.abc import Mapping
from typing import Any

from marl_pool.utils.errors import InputError


def validate_number(key: str, value: float, fits: bool, expected: str) -> None:
    """Refuse a number that does not fit, infinity or NaN.

    Args:
        key: the option's name.
        value: what came.
        fits: whether it is in range.
        expected: the range in words.

    Raises:
        InputError: it does not fit.
    """
    if not (fits and math.isfinite(value)):
        raise InputError(f"env.{key}: expected {expected}, got {value}")


def entity_counts(
    counts: str, given: Mapping[str, int | None], least: tuple[int, ...]
) -> tuple[int, ...]:
    """Read the numbers of entities, as the AdaPool paper labels its worlds.

    Args:
        counts: a number for each kind, joined by hyphens: ``"1-3-28"``.
        given: by option, in the order of ``counts``, a number that takes the place of
            its part of ``counts``; None leaves the part as it is.
        least: the least number of each kind.

    Returns:
        The numbers, in the same order.

    Raises:
        InputError: another number of parts, or a number that is too small.
    """
    parts = counts.split("-") if isinstance(counts, str) else []
    if len(parts) != len(given) or not all(part.isdecimal() for part in parts):
        form = "-".join(key.removeprefix("num_") for key in given)
        raise InputError(f"env.counts: expected {form}, such as 1-3-28, got {counts!r}")
    numbers = []
    for part, (key, number), lowest in zip(parts, given.items(), least, strict=True):
        told = number is not None
        number = number if told else int(part)
        if not isinstance(number, int) or number < lowest:
            where = key if told else f"counts: {key}"
            shown = number if told else counts
            raise InputError(
                f"env.{where}: expected an integer >= {lowest}, got {shown!r}"
            )
        numbers.append(number)
    return tuple(numbers)


def expand_counts(env: Mapping[str, Any]) -> dict[str, Any]:
    """An env's options with each number of entities in place of ``counts``.

    ``counts`` and the numbers that it stands for say the same.

    Args:
        env: ``{"name": …, **options}``, complete.
    """
    options = dict(env)
    numbers = [key for key in options if key.startswith("num_")]
    parts = str(options.get("counts", "")).split("-")
    if len(parts) == len(numbers) and all(part.isdecimal() for part in parts):
        for key, part in zip(numbers, parts, strict=True):
            options[key] = int(part) if options[key] is None else options[key]
        del options["counts"]
    return options
