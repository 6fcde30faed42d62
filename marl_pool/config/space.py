"""Ranges of a hyperparameter search, in the overrides of ``sweep --search``."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from marl_pool.config.compose import parse, parse_any
from marl_pool.sweeps import CHOICE, INT_UNIFORM, LOG_UNIFORM, UNIFORM, Space
from marl_pool.utils.errors import InputError
from marl_pool.utils.signatures import show

CALL = re.compile(r"([^=]+)=(\w+)\((.*)\)", re.DOTALL)
"""An override whose value is the call of a function."""
RANGES = (UNIFORM, LOG_UNIFORM, INT_UNIFORM)
EXPECTED = (
    f"{CHOICE}(a,b), {UNIFORM}(low,high), {LOG_UNIFORM}(low,high) or "
    f"{INT_UNIFORM}(low,high)"
)
CASTS = {"bool", "float", "int", "json_str", "str"}
"""Functions of Hydra that give one value."""


def validate_no_ranges(overrides: Iterable[str]) -> None:
    """Reject a range in the overrides of a grid."""
    for text in overrides:
        call = CALL.fullmatch(text)
        if call and call[2] in RANGES:
            raise InputError(
                f"{call[1]}: expected values, such as a,b, got {call[2]}({call[3]}); "
                "a range needs --search"
            )


def split_space(overrides: Iterable[str]) -> tuple[list[str], Space]:
    """Split overrides into those with one value, and the ranges of the others.

    Several values, such as ``key=a,b``, are a choice.
    """
    fixed, space = [], Space()
    for text in overrides:
        call = CALL.fullmatch(text)
        if call and call[2] in RANGES:
            key, kind, arguments = call.groups()
            values = parse(f"{key}=[{arguments}]").value()
            space[key] = [kind, *(values if isinstance(values, list) else [values])]
        elif call and call[2] not in {CHOICE, *CASTS}:
            raise InputError(
                f"{call[1]}: expected {EXPECTED}, got {call[2]}({call[3]})"
            )
        elif (override := parse_any(text)).is_sweep_override():
            key = override.key_or_group
            each = override.sweep_string_iterator()
            space[key] = [CHOICE, *(parse(f"{key}={one}").value() for one in each)]
        else:
            fixed.append(text)
    validate_space(space)
    return fixed, space


def validate_space(space: Space) -> None:
    """Reject ranges without values: of no kind, empty, or below 0 on a log scale."""
    for key, (kind, *values) in space.items():
        got = f"{kind}({', '.join(map(show, values))})"
        if kind == CHOICE:
            if len(values) < 2 or any(values.count(each) > 1 for each in values):
                raise InputError(f"{key}: expected distinct values, got {got}")
            continue
        if kind not in RANGES:
            raise InputError(f"{key}: expected {EXPECTED}, got {got}")
        number = "an integer" if kind == INT_UNIFORM else "a number"
        types = (int,) if kind == INT_UNIFORM else (int, float)
        if len(values) != 2 or not all(
            type(each) in types and math.isfinite(each) for each in values
        ):
            raise InputError(
                f"{key}: expected {kind}(low,high), each {number}, got {got}"
            )
        low, high = values
        if low >= high:
            raise InputError(f"{key}: expected low < high, got {got}")
        if kind == LOG_UNIFORM and low <= 0:
            raise InputError(f"{key}: expected low > 0, got {got}")


def probes_of(space: Space) -> Iterator[dict[str, Any]]:
    """Yield values of every key that together have each choice and both ends."""
    first = {key: values[0] for key, (_, *values) in space.items()}
    yield first
    for key, (_, *values) in space.items():
        for value in values[1:]:
            yield {**first, key: value}
