"""Print a composed configuration as YAML, each key under its comment.

The comments are those of the packaged YAML files, where one stands above every key.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from marl_pool.config.sections import CONFIGS, VERBS, Group, options_for
from marl_pool.reading import read_yaml

KEY = re.compile(r"^(?P<indent> *)(?:- )?(?P<key>[\w/ ]+):")


def commented(
    verb: str,
    config: Mapping[str, Any],
    chosen: Mapping[str, str | None],
    config_dir: Path | None = None,
) -> str:
    """Write a checked configuration as YAML with comments.

    Args:
        verb: whose configuration it is.
        config: from `check`.
        chosen: the option that each config group took.
        config_dir: the user's own YAML files.
    """
    notes: dict[str, list[str]] = {}
    primary = {file.stem: file for file in CONFIGS.glob("*.yaml")}
    for file in _with_bases(verb, primary):
        for key, lines in comments(file):
            notes.setdefault(key, lines)
    for group in VERBS[verb].config_groups:
        options = options_for(verb, group, config_dir)
        kind = VERBS[verb]
        preset = group in kind.presets
        named = not preset and isinstance(kind.section(group), Group)
        plugin = " or package.module:Class" if named else ""
        text = notes.pop(f"defaults.{group}", [])
        notes[group] = [*text, f"# {group}={'|'.join(options)}{plugin}"]
        # A preset's keys stand at the top; the primary file explains those it has.
        top = group in VERBS[verb].presets
        for file in _with_bases(str(chosen.get(group)), options):
            for key, lines in comments(file):
                notes.setdefault(key if top else f"{group}.{key}", lines)
    return "\n".join(_lines(config, notes)) + "\n"


def comments(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Each key of a YAML file, dotted, with the comment lines right above it."""
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.strip())
            continue
        if found := KEY.match(line):
            depth = len(found["indent"])
            parents = [parent for parent in parents if parent[0] < depth]
            parents.append((depth, found["key"]))
            yield ".".join(key for _, key in parents), above
        above = []


def _with_bases(option: str, options: Mapping[str, Path]) -> Iterator[Path]:
    """The file of an option, then those of the options that it builds on."""
    if option in options:
        yield options[option]
        content = read_yaml(options[option]) or {}
        for base in content.get("defaults", ()):
            yield from _with_bases(str(base), options)


def _lines(
    config: Mapping[str, Any], notes: Mapping[str, list[str]], path: str = ""
) -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in config.items():
        for note in notes.get(path + key, ()):
            yield f"{indent}{note}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, notes, f"{path}{key}.")
        elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_flow(item)}" for item in value)
        else:
            yield f"{indent}{key}: {_flow(value)}"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=10_000
    )
    return text.removesuffix("...\n").rstrip()
