"""Options of environments: their notation of entity counts, and what names them."""

from collections.abc import Mapping
from typing import Any

from marl_pool.options.names import short_name
from marl_pool.utils.errors import InputError


def entity_counts(
    counts: str, least: tuple[int, ...], **overrides: int | None
) -> tuple[int, ...]:
    """Parse the numbers of entities, in the notation of the AdaPool paper.

    Args:
        counts: one number per kind of entity, joined by hyphens: ``"1-3-28"``.
        least: lower bound of each part of ``counts``.
        **overrides: for each option, in the order of ``counts``, a number that
            overrides its part of ``counts``, or None to keep the part.

    Raises:
        InputError: a part of ``counts`` below its bound.
    """
    numbers = []
    for part, (key, number), lowest in zip(
        map(int, counts.split("-")), overrides.items(), least, strict=True
    ):
        if number is None and part < lowest:
            raise InputError(
                f"env.counts: {key}: expected an integer >= {lowest}, got {counts!r}"
            )
        numbers.append(part if number is None else number)
    return tuple(numbers)


def env_label(options: Mapping[str, Any]) -> str:
    """Name an environment for a title: by its module if it is another library's."""
    module = options.get("module")
    return module if isinstance(module, str) else short_name(options["name"])


def expand_counts(env_config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``counts`` by the numbers that it abbreviates; drop ``workers``.

    Two spellings of one environment become equal, so that runs can be compared. The
    number of processes that step an environment does not change it.

    Args:
        env_config: ``{"name": …, **options}`` with all options.
    """
    options = dict(env_config)
    if options.get("name") == "pettingzoo":
        options.pop("workers", None)
    keys = [key for key in options if key.startswith("num_")]
    parts = str(options.get("counts", "")).split("-")
    if len(parts) == len(keys) and all(part.isdecimal() for part in parts):
        options.pop("counts")
        for key, part in zip(keys, parts, strict=True):
            options[key] = int(part) if options[key] is None else options[key]
    return options
