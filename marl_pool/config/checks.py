"""Check a composed configuration against the signatures of what it configures.

The signature is the schema: a key is right if the constructor has such a parameter, and
its value is right if it fits the annotation.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from marl_pool.config.sections import GROUPS, NONE, SECTIONS, AnySection, Group
from marl_pool.config.verbs import VERBS
from marl_pool.evaluation.settings import TransferSettings
from marl_pool.options import names
from marl_pool.options.overrides import Override
from marl_pool.options.plugins import load
from marl_pool.options.signatures import (
    check_options,
    check_settings,
    check_value,
    join,
    options_of,
    show,
    unknown_key,
)
from marl_pool.options.types import UnitInterval
from marl_pool.training.jobs import JOBS
from marl_pool.training.settings import RunConfig
from marl_pool.utils.errors import InputError


def check(
    verb: str, config: Mapping[str, Any], overrides: Sequence[str | Override] = ()
) -> RunConfig:
    """Check the composed configuration of a run as `check_plain` does, and type it."""
    return JOBS[verb].config.from_plain(check_plain(verb, config, overrides))


def check_plain(
    verb: str, config: Mapping[str, Any], overrides: Sequence[str | Override] = ()
) -> dict[str, Any]:
    """Check a composed configuration and fill in the defaults.

    Args:
        verb: a key of `VERBS`.
        config: groups and settings as plain data.
        overrides: those that it was composed with, to repeat them in a message.

    Returns:
        The same with every key, as plain data: sections first, then settings.

    Raises:
        InputError: an unknown name or key, a wrong type or range. The message begins
            with the full key.
    """
    kind, top_level = VERBS[verb], dict(config)
    checked: dict[str, Any] = {
        name: check_section(name, top_level.pop(name, None), kind.section(name))
        for name in kind.sections
    }
    checked |= {
        name: check_change(name, top_level.pop(name, None)) for name in kind.changes
    }
    # Check the other top-level keys against the settings of the verb.
    choices = {*kind.config_groups, *options_of(kind.settings)}
    for key in top_level:
        if key not in choices:
            settings = check_settings(kind.settings, {})
            if places := places_of(key, {**checked, **settings}):
                value = _written(key, config[key], overrides)
                meant = " or ".join(f"{place}={value}" for place in places)
                raise InputError(f"{key}: unknown key {key!r}. Did you mean {meant}?")
            raise unknown_key(str(key), choices)
    checked |= check_settings(kind.settings, top_level)
    # Check the values that are sections themselves.
    entries = {"perturbations": _check_severities, "transfer": _check_transfer}
    for key, check_entry in entries.items():
        if key in checked:
            numbered = enumerate(checked[key])
            checked[key] = [check_entry(f"{key}[{i}]", entry) for i, entry in numbered]
    # Check changes of the environment against its options.
    for holder, key, where in (
        (checked.get("clone", {}), "rollout_env", "clone.rollout_env"),
        (checked, "fitness_env", "fitness_env"),
    ):
        if change := holder.get(key):
            env = checked["env"]
            if "name" in change:
                raise InputError(
                    f"{where}.name: expected options of the env {env['name']}, got "
                    f"{change['name']!r}"
                )
            env_options = check_group(where, {**env, **change}, GROUPS["env"])
            holder[key] = {option: env_options[option] for option in change}
    return checked


def _written(key: str, value: Any, overrides: Sequence[str | Override]) -> str:
    """Return a value as the user typed it, or as a message shows it."""
    typed = [text.lstrip("+") for text in overrides if isinstance(text, str)]
    values = [text.partition("=")[2] for text in typed if text.startswith(f"{key}=")]
    return [show(value), *values][-1]


def places_of(key: str, config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the full keys of a configuration that end in ``key``."""
    places = []
    for name, value in config.items():
        if name == key and prefix:
            places.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            places += places_of(key, value, f"{prefix}{name}.")
    return places


def _check_transfer(where: str, entry: Any) -> dict[str, Any]:
    checked = check_settings(TransferSettings, entry, where)
    # Collect the options of all registered environments.
    group = GROUPS["env"]
    classes = map(load, group.names().values())
    option_keys = {key for cls in classes for key in options_of(cls, group.context)}
    for key in checked["env"]:
        if key in group.context:
            raise InputError(
                f"{where}.env.{key}: expected an option of the env itself, got {key!r}"
            )
        # Other unknown keys may belong to a plug-in; an env that lacks one gives a row
        # without numbers.
        if key not in option_keys and difflib.get_close_matches(key, option_keys, n=1):
            raise unknown_key(f"{where}.env.{key}", option_keys)
    return checked


def check_change(
    name: str, config: Any, base: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Check a section that may change some keys of another one.

    Args:
        name: key of the section.
        config: a whole section, with a name; or keys to change in ``base``; or None.
        base: the section that is changed; None while it is unknown, and then keys
            without a name are returned unchecked.
    """
    if config is None or (isinstance(config, Mapping) and not config):
        return None
    # Without a name, the keys change the base.
    if isinstance(config, Mapping) and "name" not in config:
        if base is None:
            return dict(config)
        config = {**base, **config}
    return check_section(name, config, SECTIONS[name])


def check_section(name: str, config: Any, section: AnySection) -> dict[str, Any]:
    """Check one section, such as ``pooling``, against its class."""
    if isinstance(section, Group):
        return check_group(name, config, section)
    cls = section.cls()
    if is_dataclass(cls):
        return check_settings(cls, config, name)
    options = options_of(cls, section.context)
    return check_options(name, config, options, context=section.context)


def check_group(
    where: str, config: Any, group: Group, kind: str | None = None
) -> dict[str, Any]:
    """Check ``{"name": …, **options}``; messages name the key and the config group."""
    kind = kind or where
    name = _name_of(where, config, group, kind)
    values = {key: value for key, value in config.items() if key != "name"}
    # The class determines the options; "none" has no class.
    cls, options = None, {}
    if name != NONE:
        cls = names.resolve(name, group.names(), kind, load(group.base))
        options = options_of(cls, group.context)
        if "name" in options:
            raise InputError(
                f"{kind} {name!r}: expected options of other names than 'name', which "
                "is the key of the class, got the option 'name'"
            )
    elif values:
        key = join(where, min(map(str, values)))
        raise InputError(f"{key}: expected no options with {where}={name}")
    # Check the options that are groups themselves; a name alone stands for its default.
    for part in group.parts:
        if isinstance(values.get(part), str):
            values[part] = {"name": values[part]}
    checked = check_options(where, values, options, cls, group.context)
    for part, group_name in group.parts.items():
        if checked.get(part) is not None:  # null, where a class needs none
            leader = checked.get(group.leaders.get(part, "")) or {}
            checked[part] = check_group(
                f"{where}.{part}",
                _with_followed(checked[part], GROUPS[group_name], leader),
                GROUPS[group_name],
                group_name,
            )
    return {"name": name, **checked}


def _with_followed(config: Any, group: Group, leader: Mapping[str, Any]) -> Any:
    """Give a part the options in which it follows another, unless they are set."""
    name = str(config.get("name")) if isinstance(config, Mapping) else ""
    if name not in group.names():  # reported later
        return config
    keys = group.follows.keys() & options_of(group.cls(name), group.context).keys()
    return {**{key: leader[key] for key in keys if key in leader}, **config}


def _name_of(where: str, config: Any, group: Group, kind: str) -> str:
    """Return the ``name`` of a section, which must be registered or a plug-in's."""
    registry = group.names()
    if not isinstance(config, Mapping) or not isinstance(config.get("name"), str):
        raise InputError(
            f"{where}: expected one of {', '.join(sorted(registry))} or "
            f"package.module:Class, got {show(config)}"
        )
    name: str = config["name"]
    try:
        names.target(name, registry, kind)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where != kind else error) from error
    return name


def _check_severities(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Check a perturbation with a list of ``severities`` in place of one."""
    config, group = dict(entry), GROUPS["perturbation"]
    _name_of(where, config, group, "perturbation")
    if "severity" in config:
        raise InputError(
            f"{where}.severity: expected severities, a list, in a suite; got "
            f"{show(config['severity'])}"
        )
    severities = config.pop("severities", None)
    if not isinstance(severities, list | tuple) or not severities:
        raise InputError(
            f"{where}.severities: expected a list of numbers, got {show(severities)}"
        )
    # Check the perturbation with each of the severities.
    perturbations = []
    for severity in severities:
        check_value(f"{where}.severities", severity, UnitInterval)
        perturbation = {**config, "severity": severity}
        perturbations.append(check_group(where, perturbation, group, "perturbation"))
    if perturbations[0].get("ramp") is not None:
        raise InputError(
            f"{where}.ramp: expected null: a ramp belongs to training, "
            f"got {perturbations[0]['ramp']}"
        )
    plain = {key: value for key, value in perturbations[0].items() if key != "severity"}
    return {**plain, "severities": [checked["severity"] for checked in perturbations]}
