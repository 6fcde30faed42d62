"""Completion of commands in a shell, where argcomplete is installed."""

import argparse
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

COMPLETING = "_ARGCOMPLETE"
"""Environment variable by which argcomplete asks for completions."""


def complete(
    parser: argparse.ArgumentParser, verbs: Mapping[str, argparse.ArgumentParser]
) -> None:
    """Answer the shell and exit; without argcomplete do nothing."""
    with suppress(ImportError):
        import argcomplete

        from marl_pool.config.sections import VERBS

        # Keys are no arguments of the parser, so that each verb gets one more.
        for verb in VERBS.keys() & verbs.keys():
            keys: Any = verbs[verb].add_argument("keys", nargs="*")
            keys.completer = _overrides_of(verb)
        argcomplete.autocomplete(parser)


def _overrides_of(verb: str) -> Any:
    def overrides(prefix: str, **_: Any) -> list[str]:
        from marl_pool.config.sections import VERBS, options_for

        group, given, _value = prefix.partition("=")
        if given and group in VERBS[verb].config_groups:
            return [f"{group}={option}" for option in options_for(verb, group)]
        return [f"{key}=" for key in sorted(VERBS[verb].keys)]

    return overrides
