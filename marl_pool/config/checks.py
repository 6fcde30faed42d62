"""Hold a composed configuration to the signatures of what it configures.

The signature is the schema: a key is right if the constructor has such a parameter,
and its value if it fits the annotation.
"""

import difflib
import json
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from marl_pool import names
from marl_pool.config.sections import (
    GROUPS,
    SECTIONS,
    VERBS,
    AnySection,
    Group,
    Section,
    load,
)
from marl_pool.config.signatures import ANY_OTHER, Option, options_of
from marl_pool.errors import InputError
from marl_pool.evaluation.settings import WorldChange
from marl_pool.limits import check_size
from marl_pool.types import UnitInterval


def check(verb: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Check what was composed for ``verb`` and fill in the defaults.

    Args:
        verb: a key of `VERBS`.
        config: groups and settings as plain data.

    Returns:
        The same with every key, as plain data: sections first, then settings.

    Raises:
        InputError: an unknown name or key, a wrong type or range. The message begins
            with the full key.
    """
    kind, given = VERBS[verb], dict(config)
    checked: dict[str, Any] = {
        name: check_section(name, given.pop(name, None), kind.section(name))
        for name in kind.sections
    }
    checked |= {
        name: check_change(name, given.pop(name, None)) for name in kind.changes
    }
    choices = {*kind.config_groups, *options_of_settings(kind.settings)}
    for key in given:
        if key not in choices:
            raise _unknown(key, choices)
    checked |= check_settings(kind.settings, given)
    if "perturbations" in checked:
        checked["perturbations"] = [
            _check_sweep(f"perturbations[{i}]", entry)
            for i, entry in enumerate(checked["perturbations"])
        ]
    if "worlds" in checked:
        checked["worlds"] = [
            check_settings(WorldChange, entry, f"worlds[{i}]")
            for i, entry in enumerate(checked["worlds"])
        ]
        for i, world in enumerate(checked["worlds"]):
            _refuse_context(f"worlds[{i}].env", world["env"])
            _refuse_misspelt(f"worlds[{i}].env", world["env"])
    if change := checked.get("clone", {}).get("rollout_env"):
        changed = _check_env_change("clone.rollout_env", checked["env"], change)
        checked["clone"]["rollout_env"] = changed
    if change := checked.get("fitness_env"):
        changed = _check_env_change("fitness_env", checked["env"], change)
        checked["fitness_env"] = changed
    return checked


def _check_env_change(
    where: str, env: Mapping[str, Any], change: Mapping[str, Any]
) -> dict[str, Any]:
    """Check options of the env that differ for one purpose.

    Raises:
        InputError: another env, an unknown option, or a value that it cannot take.
    """
    if "name" in change:
        raise InputError(
            f"{where}.name: expected options of the env {env['name']}, got "
            f"{change['name']!r}"
        )
    whole = check_group(where, {**env, **change}, GROUPS["env"])
    return {key: whole[key] for key in change}


def _refuse_context(where: str, change: Mapping[str, Any]) -> None:
    """Refuse what the program itself tells an env, such as the seed."""
    for key in change:
        if key in GROUPS["env"].context:
            raise InputError(
                f"{where}.{key}: expected an option of the env's own, got {key!r}"
            )


def _refuse_misspelt(where: str, change: Mapping[str, Any]) -> None:
    """Refuse a key that no env has and that is nearly one that some env has.

    Other unknown keys may be those of a plug-in; what a world lacks is a gap.
    """
    group = GROUPS["env"]
    known = {
        key
        for target in group.names().values()
        for key in options_of(target, group.context)
    }
    for key in change:
        if key not in known and difflib.get_close_matches(key, known, n=1):
            raise _unknown(f"{where}.{key}", known)


def check_change(
    name: str, given: Any, base: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Check a section that may change some keys of another one.

    Args:
        name: of the section.
        given: all of it, with a name; or keys to change in ``base``; or None.
        base: what it changes; None while that is not known, and then keys without a
            name are taken as they are.

    Returns:
        The whole section, the keys without a name, or None.
    """
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if not isinstance(given, Mapping) or "name" in given:
        return check_section(name, given, SECTIONS[name])
    if base is None:
        return dict(given)
    return check_section(name, {**base, **given}, SECTIONS[name])


def check_section(name: str, given: Any, section: AnySection) -> dict[str, Any]:
    """Check one section, such as ``pooling``, against its class."""
    if isinstance(section, Group):
        return check_group(name, given, section)
    if isinstance(section, Section):
        options = options_of(section.target, section.context)
        return check_options(name, given, options)
    return check_settings(section, given, name)


def check_group(
    where: str, given: Any, group: Group, kind: str | None = None
) -> dict[str, Any]:
    """Check ``{"name": …, **options}``.

    Args:
        where: the key, for messages.
        given: what was composed.
        group: says which names there are.
        kind: what it is, for messages; ``where`` if None.
    """
    kind = kind or where
    registry = group.names()
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise InputError(
            f"{where}: expected one of {', '.join(sorted(registry))} or "
            f"package.module:Class, got {show(given)}"
        )
    rest = dict(given)
    name = rest.pop("name")
    found = names.target(name, registry, kind)
    if name not in registry:
        base = load(group.base)
        assert isinstance(base, type)
        names.resolve(name, registry, kind, base)
    if not found and rest:
        raise InputError(
            f"{_join(where, min(rest))}: expected no options with {where}={name}"
        )
    options = options_of(found, group.context) if found else {}
    checked = check_options(where, rest, options)
    for part, own in group.parts.items():
        if checked.get(part) is not None:  # some classes do without, by null
            checked[part] = check_group(
                f"{where}.{part}", checked[part], GROUPS[own], own
            )
    return {"name": name, **checked}


def check_settings(settings: type[Any], given: Any, where: str = "") -> dict[str, Any]:
    """Check the keys of a dataclass of settings, and that it can be made of them."""
    checked = check_options(where, given, options_of_settings(settings))
    settings(**checked)
    return checked


def options_of_settings(settings: type[Any]) -> dict[str, Option]:
    """The fields of a dataclass as options."""
    hints = get_type_hints(settings, include_extras=True)
    options = {}
    for item in fields(settings):
        default = item.default
        if item.default_factory is not MISSING:
            default = to_jsonable_python(item.default_factory())
        elif default is MISSING:
            default = Parameter.empty
        options[item.name] = Option(hints[item.name], default)
    return options


def check_options(
    where: str, given: Any, options: Mapping[str, Option]
) -> dict[str, Any]:
    """Check a mapping of keys to values; return it complete, in the options' order.

    Args:
        where: the section's key, for messages; empty at the top level.
        given: what was composed; None counts as an empty mapping.
        options: the keys that there are.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: expected a mapping of keys, got {show(given)}")
    named = {key: option for key, option in options.items() if key != ANY_OTHER}
    for key in given:
        if key not in named:
            if ANY_OTHER not in options:
                raise _unknown(_join(where, key), named)
            named[key] = options[ANY_OTHER]
    checked = {}
    for key, option in named.items():
        full = _join(where, key)
        if key in given:
            checked[key] = check_value(full, given[key], option.annotation)
            check_size(full, checked[key])
        elif option.required:
            raise InputError(
                f"{full}: expected {describe(option.annotation)}; it has no default"
            )
        else:
            checked[key] = to_jsonable_python(option.default)
    return checked


def check_value(key: str, value: Any, annotation: Any) -> Any:
    """Check one value against an annotation; return it as plain data.

    Strict as JSON is strict: a list serves as a tuple, a whole number as a float and
    1e6 as an integer, but neither ``"3"`` nor ``true`` is a number.
    """
    if isinstance(annotation, type) and is_dataclass(annotation):
        return check_settings(annotation, value, key)
    adapter: TypeAdapter[Any] = TypeAdapter(
        annotation, config=ConfigDict(arbitrary_types_allowed=True)
    )
    try:
        text = json.dumps(_whole(value))
    except TypeError as error:
        raise InputError(
            f"{key}: expected plain numbers, text, lists and mappings, got "
            f"{show(value):.200}"
        ) from error
    try:
        fitting = adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(
            f"{key}: expected {describe(annotation)}, got {show(value)}"
        ) from error
    return to_jsonable_python(fitting)


def _check_sweep(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Check a perturbation with a list of ``severities`` in place of one."""
    rest = dict(entry)
    if "severity" in rest:
        raise InputError(
            f"{where}.severity: expected severities, a list, in a suite; got "
            f"{show(rest['severity'])}"
        )
    severities = rest.pop("severities", None)
    if (
        not isinstance(severities, Sequence)
        or isinstance(severities, str)
        or (not severities)
    ):
        raise InputError(
            f"{where}.severities: expected a list of numbers, got {show(severities)}"
        )
    each = []
    for severity in severities:
        check_value(f"{where}.severity", severity, UnitInterval)
        given = {**rest, "severity": severity}
        each.append(check_group(where, given, GROUPS["perturbation"], "perturbation"))
    if each[0].get("ramp") is not None:
        raise InputError(
            f"{where}.ramp: expected null: a ramp belongs to training, "
            f"got {each[0]['ramp']}"
        )
    plain = {key: value for key, value in each[0].items() if key != "severity"}
    return {**plain, "severities": [checked["severity"] for checked in each]}


def describe(annotation: Any) -> str:
    """Say in words which values fit, such as ``an integer >= 0 or null``."""
    *most, last = dict.fromkeys(_alternatives(annotation))
    return f"{', '.join(most)} or {last}" if most else last


WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "anything",
}


def _alternatives(annotation: Any) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return [words for part in arguments for words in _alternatives(part)]
    if origin is Literal:
        return [str(choice) for choice in arguments]
    if origin is Annotated:
        return [_annotated(arguments[0], arguments[1:])]
    if origin is tuple and arguments[-1] is not Ellipsis:
        return [f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if get_origin(arguments[-1]) is None:
            return ["a mapping"]
        return [f"a mapping (each {describe(arguments[-1])})"]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [f"a list (each {describe(arguments[0])})"]
    if annotation in WORDS:
        return [WORDS[annotation]]
    return [str(getattr(annotation, "__name__", annotation))]


def _annotated(annotation: Any, metadata: Iterable[Any]) -> str:
    bounds: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo) and item.description:
            return item.description
        for constraint in item.metadata if isinstance(item, FieldInfo) else [item]:
            for name in ("ge", "gt", "le", "lt"):
                if hasattr(constraint, name):
                    bounds[name] = getattr(constraint, name)
    return describe(annotation) + _interval(**bounds)


def _interval(ge: Any = None, gt: Any = None, le: Any = None, lt: Any = None) -> str:
    low = f">= {ge}" if ge is not None else f"> {gt}" if gt is not None else ""
    high = f"<= {le}" if le is not None else f"< {lt}" if lt is not None else ""
    if low and high:
        start = f"[{ge}" if gt is None else f"({gt}"
        end = f"{le}]" if lt is None else f"{lt})"
        return f" in {start}, {end}"
    return f" {low}{high}" if low or high else ""


def show(value: Any) -> str:
    """A value as it would be written in YAML, strings in quotes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)


def _whole(value: Any) -> Any:
    """Turn 1e6, which YAML reads as a float, into the integer that it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _unknown(key: str, choices: Collection[str]) -> InputError:
    section, _, short = key.rpartition(".")
    if not choices:
        return InputError(f"{key}: this {section} takes no options")
    return InputError(f"{key}: {names.unknown('key', short, choices)}")
