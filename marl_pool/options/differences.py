"""Settings in which two configurations differ."""

from collections.abc import Collection, Mapping
from typing import Any

from marl_pool.options.overrides import flat_options, is_among
from marl_pool.options.signatures import show


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], ignored: Collection[str]
) -> list[str]:
    """List the settings in which two configurations differ.

    Args:
        expected: nested plain data.
        actual: nested plain data.
        ignored: dotted keys of settings, and top-level keys of whole sections.
    """
    first, second = dict(flat_options(expected)), dict(flat_options(actual))
    return [
        f"{key}: expected {show(first.get(key))}, got {show(second.get(key))}"
        for key in first | second
        if not is_among(key, ignored) and first.get(key) != second.get(key)
    ]
