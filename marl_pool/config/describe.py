"""Print a composed configuration as YAML, each key under its docstring's text."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from marl_pool.config.sections import GROUPS, NONE, AnySection, Group, registry
from marl_pool.config.suitability import options_for
from marl_pool.config.verbs import VERBS
from marl_pool.files.reading import dump_yaml
from marl_pool.options.names import resolve
from marl_pool.options.plugins import load
from marl_pool.options.signatures import ANY_OTHER, describe, meanings, options_of

YAML_WORDS = {"None": "null", "True": "true", "False": "false"}


def commented(
    verb: str, config: Mapping[str, Any], config_dir: Path | None = None
) -> str:
    """Write a checked ``config`` as YAML with comments."""
    kind = VERBS[verb]
    notes = dict(explanations(kind.settings))
    for group in kind.config_groups:
        preset = group in kind.presets
        has_name = not preset and isinstance(kind.section(group), Group)
        plugin = " or package.module:Class" if has_name else ""
        options = "|".join(options_for(verb, group, config_dir))
        notes[group] = [*notes.get(group, ()), f"# {group}={options}{plugin}"]
        if not preset and config.get(group):
            notes |= dict(_explained(kind.section(group), config[group], f"{group}."))
    return "\n".join(_lines(config, notes)) + "\n"


def commented_options(kind: str, name: str) -> str:
    """Write the options of a registered name as YAML, with defaults and comments.

    Args:
        kind: as in `registry`, such as ``"pooling"`` or ``"envs"``.
        name: a key of that registry.
    """
    cls = load(registry(kind)[name])
    group_names = {"strategies": "evolution", "policies": "policy"}
    group = GROUPS.get(group_names.get(kind, kind.removesuffix("s")))
    options = options_of(cls, group.context if group else frozenset())
    notes, lines = dict(explanations(cls)), _comment(_summary(cls))
    options.pop(ANY_OTHER, None)
    for key, option in options.items():
        default = to_jsonable_python(option.default, fallback=str)
        text = "???" if option.required else _flow(default)
        lines += [*notes[key], f"{key}: {text}"]
    return "\n".join(lines) + "\n"


def explanations(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each option of a class with its meaning and the values that fit."""
    texts = meanings(cls)
    for key, (annotation, _) in options_of(cls).items():
        meaning = texts.get(key, "")
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield prefix + key, _comment(meaning)
            yield from explanations(annotation, f"{prefix}{key}.")
        else:
            yield prefix + key, _comment(f"{meaning} [{describe(annotation)}]")


def _explained(
    section: AnySection, config: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield the options of a checked section, its parts included."""
    if not isinstance(section, Group):
        yield from explanations(section.cls(), prefix)
        return
    # The group may be switched off.
    name = config.get("name", NONE)
    if name == NONE:
        yield f"{prefix}name", ["# Nothing."]
        return
    # Explain the class and its options, then the parts in it.
    cls = resolve(name, section.names(), prefix.rstrip("."), load(section.base))
    yield f"{prefix}name", _comment(_summary(cls))
    yield from explanations(cls, prefix)
    for part, group in section.parts.items():
        if config.get(part):
            yield from _explained(GROUPS[group], config[part], f"{prefix}{part}.")


def _summary(cls: type) -> str:
    return cleandoc(cls.__doc__ or "").partition("\n")[0]


def _comment(text: str) -> list[str]:
    """Turn a docstring's text into comment lines, with YAML's words for constants."""
    plain = re.sub(r"`{1,2}([^`]*)`{1,2}", r"\1", text).strip()
    plain = re.sub(r"\b(None|True|False)\b", lambda m: YAML_WORDS[m[0]], plain)
    # Capitalise sentences, but not symbols or file names.
    if re.match(r"[a-z]{2,}\b(?![.:]\w)", plain) or plain.startswith("a "):
        plain = plain[0].upper() + plain[1:]
    lines = textwrap.wrap(plain, 84, break_long_words=False)
    return [f"# {line}" for line in lines]


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
    text = dump_yaml(value, default_flow_style=True, width=1e4)
    return text.removesuffix("...\n").rstrip()
