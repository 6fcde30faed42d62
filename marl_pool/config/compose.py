"""Compose a configuration from signatures, YAML files and a user's overrides.

Each verb names a default option for each group. Presets choose other options and set
keys; what the user types takes precedence. An option holds the defaults of a
constructor's signature, or the keys of a YAML file on top of the options that it names
as ``defaults``; a list named ``KEY+`` is appended to ``KEY``'s. Any key is
composed; the check that follows compares it with the signature.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from pydantic_core import to_jsonable_python

from marl_pool.config.checks import check_plain
from marl_pool.config.option_files import (
    DEFAULTS_KEY,
    bases_first,
    choices_in,
    content_of,
    files_of,
    is_packaged,
)
from marl_pool.config.sections import NONE, AnySection, Group, built_in
from marl_pool.config.suitability import options_for, suits, unsuited
from marl_pool.config.verbs import SIZES, VERBS
from marl_pool.files.reading import YAML_BYTES, read_bytes
from marl_pool.options import names
from marl_pool.options.overrides import NAMED, Override, parse
from marl_pool.options.signatures import ANY_OTHER, options_of, show
from marl_pool.utils.errors import InputError, first_line
from marl_pool.utils.paths import user_path

RESOLVER = re.compile(r"\$\{\s*(?!oc\.select\s*:)[\w.]+\s*:")
"""OmegaConf's ``${function:arguments}``; ``oc.select`` sees the configuration only."""

Config = dict[str, Any]
"""Plain data by key."""


class Origin(NamedTuple):
    """Source of a value of a configuration."""

    option: str
    """Option of the package, such as ``ppo=fast``; empty if the user set the value."""
    value: Any


def compose(
    verb: str,
    overrides: Sequence[str | Override] = (),
    config_dir: str | Path | None = None,
) -> Config:
    """Compose and check the configuration of ``verb``.

    Args:
        verb: a key of `VERBS`.
        overrides: ``group=option`` or ``key=value``. The option of a group with a
            registry may be ``package.module:Class``.
        config_dir: a folder of the user's own YAML files, laid out like the package's
            but with other names.

    Returns:
        All keys as plain data: sections first, then settings.

    Raises:
        InputError: bad syntax, an unknown option or key, a wrong type or range.
    """
    composed = compose_only(verb, overrides, config_dir)
    with naming_files(verb, overrides, config_dir):
        return check_plain(verb, composed, overrides)


@contextmanager
def naming_files(
    verb: str, overrides: Sequence[str | Override], config_dir: str | Path | None
) -> Iterator[None]:
    """Name the user's files, or the preset, with which a configuration is wrong."""
    try:
        yield
    except names.UntrustedError:
        raise
    except InputError as error:
        files = _mentioned(_files(config_dir), overrides) if config_dir else []
        if not files:
            # A preset may have keys for another option than the user's.
            key, separator, _ = str(error).partition(": unknown key")
            preset = separator and origin(verb, key, overrides, config_dir).option
            if not preset:
                raise
            raise InputError(f"{error} (a key of {preset})") from error
        raise InputError(
            f"{error} (composed with {', '.join(map(str, files))})"
        ) from error


def compose_only(
    verb: str,
    overrides: Sequence[str | Override] = (),
    config_dir: str | Path | None = None,
) -> Config:
    """Compose without checking."""
    kind, folder = VERBS[verb], _folder(config_dir)
    parsed, choices = _read(verb, overrides, folder)
    # Settings and sections first, then the keys of presets and of the user.
    config = _defaults(kind.settings)
    for group, option in choices.items():
        if group not in kind.presets and option is not None:
            config[group] = {}
            for content in _contents(verb, group, option, folder):
                _merge(config[group], content)
    for group in kind.presets:
        if option := choices.get(group):
            for content in _contents(verb, group, option, folder):
                _merge(config, content)
    for override in parsed:
        if override.key in NAMED:
            config[override.key] = override.value
        elif override.key not in kind.config_groups:
            _merge(config, _nested(override))
    _fit_minibatch(verb, config, overrides, config_dir)
    return _resolve(verb, config)


def origin(
    verb: str,
    key: str,
    overrides: Sequence[str | Override] = (),
    config_dir: str | Path | None = None,
) -> Origin:
    """Return the source from which `compose_only` takes ``section.key``."""
    kind, folder = VERBS[verb], _folder(config_dir)
    parsed, choices = _read(verb, overrides, folder)
    section, _, name = key.partition(".")
    latest = Origin("", None)
    for group in (section, *kind.presets):
        option = choices.get(group)
        files = files_of(group, folder)
        for base in bases_first(group, option, files) if option else ():
            content = _content(verb, group, base, folder)
            values = content if group == section else content.get(section)
            if isinstance(values, Mapping) and name in values:
                file = files.get(base)
                is_ours = file is None or is_packaged(file)
                label = f"{group}={base}" if is_ours else ""
                latest = Origin(label, values[name])
    for override in parsed:
        if override.key == key:
            latest = Origin("", override.value)
    return latest


def _fit_minibatch(
    verb: str,
    config: Config,
    overrides: Sequence[str | Override],
    config_dir: str | Path | None,
) -> None:
    """Limit a minibatch size that the user did not set to the batch size."""
    ppo = config.get("ppo")
    if not isinstance(ppo, dict):
        return
    batch, minibatch = ppo.get("batch_size"), ppo.get("minibatch_size")
    if not (type(batch) is type(minibatch) is int and 0 < batch < minibatch):
        return
    if origin(verb, "ppo.minibatch_size", overrides, config_dir).option:
        ppo["minibatch_size"] = batch


def _read(
    verb: str, overrides: Sequence[str | Override], folder: Path | None
) -> tuple[list[Override], dict[str, str | None]]:
    """Return the parsed overrides, and the option of each group."""
    parsed = _parse_all(overrides)
    # Separate the options of groups from the values of keys.
    user_options: dict[str, str] = {}
    for override in parsed:
        if override.key in VERBS[verb].config_groups:
            user_options[override.key] = _option(verb, override, folder)
        else:
            _validate_group(verb, override.key)
    return parsed, _choose(verb, user_options, folder)


def _parse_all(overrides: Sequence[str | Override]) -> list[Override]:
    return [
        parse(override) if isinstance(override, str) else override
        for override in overrides
    ]


def assign(config: Mapping[str, Any], overrides: Sequence[str | Override]) -> Config:
    """Return ``config``, composed earlier, with some keys replaced, unchecked.

    Interpolations are not resolved: a stored text may contain ``${``.
    """
    changed = copy.deepcopy(dict(config))
    for override in _parse_all(overrides):
        *parents, last = override.key.split(".")
        section: Any = changed
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise InputError(f"{override.key}: {parent} has no keys")
        _merge(section, {last: override.value})
    return changed


def _choose(
    verb: str, user_options: Mapping[str, str], folder: Path | None
) -> dict[str, str | None]:
    """Return the option of each group: the default, a preset's or the user's."""
    kind = VERBS[verb]
    choices = {**kind.sections, **kind.presets, **user_options}
    # A preset may choose another one, and sizes follow task and scale if they have a
    # file: so one pass more than there are presets.
    for _ in range(len(kind.presets) + 1):
        sizes: dict[str, str | None] = {}
        if SIZES in kind.presets and SIZES not in user_options:
            option = f"{choices['task']}_{choices['scale']}"
            sizes = {SIZES: option if option in files_of(SIZES, folder) else None}
        next_choices = {**kind.sections, **kind.presets, **sizes, **user_options}
        for group in kind.presets:
            if preset := next_choices[group]:
                for content in _contents(verb, group, preset, folder):
                    next_choices |= choices_in(content)
            next_choices |= {**sizes, **user_options}
        choices = next_choices
    task, typed_sizes = choices.get("task"), user_options.get(SIZES, "")
    if task and typed_sizes.rpartition("_")[0] in {*built_in("task")} - {task}:
        raise InputError(
            f"{SIZES}: expected those of task={task}, got {typed_sizes}; "
            "scale=tiny|cpu|paper chooses them"
        )
    return choices


def _option(verb: str, override: Override, folder: Path | None) -> str:
    """Return the option of a group that the user chose, checked."""
    kind, group, value = VERBS[verb], override.key, override.value
    if not isinstance(value, str):
        options = ", ".join(options_for(verb, group, folder))
        raise InputError(f"{group}: expected one of {options}, got {show(value)}")
    if suits(verb, group, value, folder):
        return value
    # It may be the name of a class, where a registry has such names.
    section = None if group in kind.presets else kind.section(group)
    if not isinstance(section, Group) or value in {
        *built_in(group),
        *files_of(group, folder),
    }:
        raise unsuited(verb, group, value, folder)
    choices = {**section.names(), **dict.fromkeys(options_for(verb, group, folder), "")}
    names.target(value, choices, group)
    return value


def _contents(
    verb: str, group: str, option: str, folder: Path | None
) -> Iterator[Config]:
    """Yield what an option builds on, then its own keys, ``defaults`` included."""
    for base in bases_first(group, option, files_of(group, folder)):
        yield _content(verb, group, base, folder)


def _content(verb: str, group: str, option: str, folder: Path | None) -> Config:
    """Return an option's own keys: from its file, its signature, or its name."""
    files = files_of(group, folder)
    if option in files:
        return content_of(files[option])
    if option in built_in(group):
        return signature(VERBS[verb].section(group), option)
    return {"name": option}


def signature(section: AnySection, option: str) -> Config:
    """Return the keys of an option without a file: a name, and its defaults."""
    if option == NONE:
        return {"name": NONE}
    defaults = _defaults(section.cls(option), section.context)
    if not isinstance(section, Group):
        return defaults
    defaults.pop("name", None)  # the check refuses an option of this name
    followed = {key: section.follows[key] for key in defaults if key in section.follows}
    return {"name": option, **defaults, **followed}


def _defaults(cls: type[Any], context: Set[str] = frozenset()) -> Config:
    return {
        key: to_jsonable_python(option.default)
        for key, option in options_of(cls, context).items()
        if key != ANY_OTHER and not option.required  # the check reports a missing one
    }


def _nested(override: Override) -> Config:
    """Return a mapping for each section that the key of an override names."""
    nested = override.value
    for name in reversed(override.key.split(".")):
        nested = {name: nested}
    return nested


def _merge(config: Config, content: Mapping[str, Any]) -> None:
    """Replace values in ``config``; merge mappings, and append ``KEY+`` to a list."""
    for key, value in content.items():
        if key == DEFAULTS_KEY:
            continue
        if isinstance(value, Mapping):
            section = config.get(key)
            if isinstance(section, str):  # a part given by its name alone
                section = {"name": section}
            config[key] = dict(section) if isinstance(section, Mapping) else {}
            _merge(config[key], value)
        elif (
            isinstance(value, list)
            and str(key).endswith("+")
            and isinstance(base := config.get(key[:-1]), list)
        ):
            config[key[:-1]] = [*base, *value]
        else:
            config[key] = value


def _resolve(verb: str, config: Mapping[str, Any]) -> Config:
    """Resolve interpolations.

    Raises:
        InputError: an interpolation of a missing key; or a resolver, such as
            ``${oc.env:NAME}``, in a file that may be another person's.
    """
    # A resolver reads environment variables.
    if names.is_restricted():
        for text in sorted(names.texts_in(config) - names.allowed()):
            if RESOLVER.search(text):
                raise InputError(
                    f"{text!r:.80}: expected plain values in a file, got a resolver"
                )
    try:
        resolved: Any = OmegaConf.to_container(
            OmegaConf.create(dict(config)), resolve=True, throw_on_missing=True
        )
    except OmegaConfBaseException as error:
        raise _unresolved(verb, error) from error
    return {str(key): value for key, value in resolved.items()}


def _unresolved(verb: str, error: OmegaConfBaseException) -> InputError:
    # The message names the interpolation that has no value.
    reason = first_line(error)
    match = re.search(r"(?:'|type )([^']+)", reason)
    name = match[1] if match else ""
    if isinstance(error, InterpolationKeyError):
        actual = f"${{{name}}}, which is not a key of {verb}"
    elif isinstance(error, UnsupportedInterpolationType):
        actual = f"the unknown function {name} in ${{…}}"
    elif isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        actual = "none"
    elif "Recursive" in reason or "parent node" in reason:
        actual = "an interpolation of itself"
    else:
        actual = reason.rpartition("resolving interpolation: ")[2].strip('"')
    return InputError(f"{error.full_key or verb}: expected a value, got {actual}")


def _validate_group(verb: str, key: str) -> None:
    """Reject a group that only other verbs have."""
    verbs = [name for name, kind in VERBS.items() if key in kind.config_groups]
    if verbs and key not in options_of(VERBS[verb].settings):
        groups = ", ".join(VERBS[verb].config_groups)
        raise InputError(
            f"{key}: a group of {', '.join(verbs)}, not of {verb}, "
            f"whose groups are {groups}"
        )


def _folder(config_dir: str | Path | None) -> Path | None:
    if config_dir is None:
        return None
    folder = user_path(config_dir).resolve()
    if not folder.is_dir():
        raise InputError(f"--config-dir: no such folder: {config_dir}")
    for file in _files(folder):
        # Otherwise one of the two would be chosen silently.
        place = file.relative_to(folder)
        group, *parts = place.with_suffix("").parts
        if "/".join(parts) in {*built_in(group), *files_of(group)}:
            raise InputError(f"--config-dir: {file} is the package's name; rename it")
    return folder


def _files(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).rglob("*.yaml"))


def _mentioned(
    files: Sequence[Path], overrides: Sequence[str | Override]
) -> list[Path]:
    """Return the files whose names occur in the overrides or in such files."""
    mentioned: list[Path] = []
    text = "\n".join(map(str, overrides))
    # `a` is no mention in `cartpole`.
    while new := [
        file
        for file in files
        if file not in mentioned
        and re.search(rf"(?<![\w-]){re.escape(file.stem)}(?![\w-])", text)
    ]:
        mentioned += new
        for file in new:
            with suppress(OSError, InputError):  # the check names what is wrong
                text += read_bytes(file, YAML_BYTES).decode("utf-8", "replace")
    return mentioned
