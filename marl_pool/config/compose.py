"""Compose a configuration from signatures, YAML files and a user's overrides.

Hydra only composes. It would reject a misspelt key before it could be compared with a
signature, so every override of a key may add it, and the check that follows rejects it.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from marl_pool.config.checks import check
from marl_pool.config.sections import (
    CONFIGS,
    SIZES,
    VERBS,
    Group,
    built_in,
    content_of,
    files_of,
    options_for,
    typed,
    unsuited,
)
from marl_pool.config.source import SignatureSource
from marl_pool.config.wording import one_line_errors, wrong_override
from marl_pool.utils import names
from marl_pool.utils.errors import InputError
from marl_pool.utils.reading import YAML_BYTES, read_bytes
from marl_pool.utils.signatures import options_of, show

RESOLVER = re.compile(r"\$\{\s*(?!oc\.select\s*:)[\w.]+\s*:")
"""OmegaConf's ``${function:arguments}``; ``oc.select`` sees the configuration only."""
PACKAGE = "@package"
"""Directive in a file's first comment that tells Hydra where its keys belong."""
SOURCE = f"'{SignatureSource.scheme()}://marl_pool'"
"""Search path of the options without a YAML file."""


def compose(
    verb: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> dict[str, Any]:
    """Compose and check the configuration of ``verb``.

    Args:
        verb: a key of `VERBS`.
        overrides: ``group=option`` or ``key=value``, Hydra's syntax. The option of a
            group with a registry may be ``package.module:Class``.
        config_dir: a folder of the user's own YAML files, laid out like the package's
            but with names of their own.

    Returns:
        All keys as plain data: sections first, then settings.

    Raises:
        InputError: bad syntax, an unknown option or key, a wrong type or range.
    """
    composed = compose_only(verb, overrides, config_dir)
    return check_composed(verb, composed, overrides, config_dir)


def check_composed(
    verb: str,
    composed: Mapping[str, Any],
    overrides: Sequence[str],
    config_dir: str | Path | None,
) -> dict[str, Any]:
    """Check what `compose_only` returned; a message names the user's own files."""
    try:
        return check(verb, composed)
    except names.UntrustedError:
        raise
    except InputError as error:
        used = _mentioned(_files(config_dir), overrides) if config_dir else []
        if not used:
            raise
        raise InputError(
            f"{error} (composed with {', '.join(map(str, used))})"
        ) from error


def compose_only(
    verb: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> dict[str, Any]:
    """Compose without the check."""
    return resolve(verb, compose_unresolved(verb, overrides, config_dir))


def compose_unresolved(
    verb: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> DictConfig:
    """Compose, and keep interpolations for `resolve`."""
    folder = _folder(config_dir, overrides)
    # Translate the overrides, so that Hydra accepts new keys and plug-ins.
    lines = [line for text in overrides for line in _translate(verb, text, folder)]
    own = [f"'file://{folder}'"] if folder else []
    lines.append(f"hydra.searchpath=[{','.join([SOURCE, *own])}]")
    # Files and classes of the user's own may change while the process runs.
    fixed = folder is None and not any(":" in text for text in overrides)
    composing = _compose if fixed else _compose.__wrapped__
    composed, chosen = composing(verb, *lines)
    # Choose the sizes that belong to task and scale.
    if SIZES not in VERBS[verb].presets:
        return composed
    task, sizes = chosen.get("task"), chosen[SIZES]
    if sizes is None:
        # Hydra lets no choice follow from others if it makes choices of its own.
        option = f"{task}_{chosen['scale']}"
        # Follow task and scale if there is a file for them.
        if option in files_of(SIZES, folder):
            composed, _ = composing(verb, *lines, f"{SIZES}={option}")
    elif task and sizes.rpartition("_")[0] in {*built_in("task")} - {task}:
        raise InputError(
            f"{SIZES}: expected those of task={task}, got {sizes}; "
            "scale=tiny|cpu|paper chooses them"
        )
    return composed


@lru_cache(maxsize=64)
def _compose(verb: str, *lines: str) -> tuple[DictConfig, dict[str, Any]]:
    """Compose by Hydra, which takes a tenth of a second; nobody changes the result."""
    Plugins.instance().register(SignatureSource)
    with (
        one_line_errors(verb),
        initialize_config_dir(str(CONFIGS), version_base="1.3"),
    ):
        composed = hydra_compose(verb, [*lines], return_hydra_config=True)
    chosen: Any = OmegaConf.to_container(composed.hydra.runtime.choices)
    del composed._content["hydra"]  # type: ignore[union-attr]
    return composed, dict(chosen)


def resolve(
    verb: str, composed: DictConfig, values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Set ``values`` by dotted key, then resolve interpolations to plain data.

    Raises:
        InputError: an interpolation of a missing key; or a resolver, such as
            ``${oc.env:NAME}``, in a file that may be another person's.
    """
    with one_line_errors(verb):
        # Copy before changing: compositions are cached.
        if values:
            composed = copy.deepcopy(composed)
            OmegaConf.set_struct(composed, False)
        for key, value in (values or {}).items():
            OmegaConf.update(composed, key, value, force_add=True)
        # A resolver reads environment variables.
        if names.is_restricted():
            texts = names.texts_in(OmegaConf.to_container(composed))
            for text in sorted(texts - names.allowed()):
                if RESOLVER.search(text):
                    raise InputError(
                        f"{text!r:.80}: expected plain values in a file, got a resolver"
                    )
        # Resolve the interpolations, and fail on missing values.
        plain: Any = OmegaConf.to_container(
            composed, resolve=True, throw_on_missing=True
        )
        return {str(key): value for key, value in plain.items()}


def parse(text: str) -> Override:
    """Parse one ``key=value``; raise `InputError` for a sweep or a deletion."""
    override = parse_any(text)
    if override.is_sweep_override():
        raise InputError(
            f"{override.key_or_group}: expected one value, got several: {text!r}. "
            "Write a list as key=[a,b]"
        )
    return override


def parse_any(text: str) -> Override:
    """Parse one ``key=value``, or a sweep such as ``key=value,value``."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise wrong_override(text) from error
    if override.is_delete() or not override.key_or_group:
        raise InputError(f"{text!r}: expected key=value")
    return override


def assign(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``config``, composed earlier, with some keys replaced, unchecked.

    Interpolations are not resolved: a stored text may contain ``${``.
    """
    changed = copy.deepcopy(dict(config))
    for override in map(parse, overrides):
        *parents, last = override.key_or_group.split(".")
        section: Any = changed
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise InputError(f"{override.key_or_group}: {parent} has no keys")
        section[last] = override.value()
    return changed


def _translate(verb: str, text: str, folder: Path | None) -> list[str]:
    """Translate an override into those that Hydra accepts."""
    kind, override = VERBS[verb], parse(text)
    key, value = override.key_or_group, override.value()
    if key.split(".")[0] == "hydra":
        raise InputError(f"{key}: Hydra's own settings have no effect here")
    if override.package is not None:
        raise InputError(f"{key}: expected {key}=…, got {text!r}")
    # A plain key may be new, so add or override it.
    if key not in kind.config_groups:
        _validate_group(verb, key)
        return [f"++{text.lstrip('+')}"]
    # A group takes the name of an option.
    options = options_for(verb, key, folder)
    if not isinstance(value, str):
        raise InputError(
            f"{key}: expected one of {', '.join(options)}, got {show(value)}"
        )
    if value in options:
        return [text.lstrip("+")]
    # Or the name of a class, where a registry has such names.
    section = None if key in kind.presets else kind.section(key)
    known = {*built_in(key), *files_of(key, folder)}
    if value in known or not isinstance(section, Group):
        raise unsuited(verb, key, value, folder)
    names.target(value, {**section.names(), **dict.fromkeys(options, "")}, key)
    # Hydra has no option for a class of the user's own, so set the name itself.
    return [f"~{key}", f"++{key}.name='{value}'"]


def _validate_group(verb: str, key: str) -> None:
    """Reject a group that only other verbs have."""
    others = [
        name
        for name, kind in VERBS.items()
        if key in kind.config_groups and "_" not in name  # typed as a flag
    ]
    if others and key not in options_of(VERBS[verb].settings):
        groups = ", ".join(VERBS[verb].config_groups)
        raise InputError(
            f"{key}: a group of {', '.join(others)}, not of {typed(verb)}, "
            f"whose groups are {groups}"
        )


def _folder(config_dir: str | Path | None, overrides: Sequence[str]) -> Path | None:
    if config_dir is None:
        return None
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise InputError(f"--config-dir: no such folder: {config_dir}")
    if {"'", "\\", "$"} & {*str(folder)}:
        # Such a path could add folders to Hydra's search path.
        raise InputError(
            f"--config-dir: expected a path without ', $ and backslash, got {folder}"
        )
    files = _files(folder)
    for file in files:
        # Hydra would silently use the package's own.
        own = file.relative_to(folder)
        known = own.stem in built_in(own.parent.as_posix())
        if known or (CONFIGS / own).exists():
            raise InputError(f"--config-dir: {file} is the package's name; rename it")
    # Check the files that may be used, before Hydra reads them.
    for file in _mentioned(files, overrides):
        _validate_file(file, folder)
    return folder


def _files(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).rglob("*.yaml"))


def _mentioned(files: Sequence[Path], overrides: Sequence[str]) -> list[Path]:
    """Return the files whose names occur in the overrides or in such files."""
    found: list[Path] = []
    text = "\n".join(overrides)
    while new := [file for file in files if file.stem in text and file not in found]:
        found += new
        for file in new:
            with suppress(OSError, InputError):  # the check names what is wrong
                text += read_bytes(file, YAML_BYTES).decode("utf-8", "replace")
    return found


def _validate_file(file: Path, folder: Path) -> None:
    """Check what Hydra's reader would not, or explain without the file's name."""
    group = file.relative_to(folder).parts[0]
    known = {*built_in(group), *files_of(group, folder)}
    for base in content_of(file).get("defaults", ()):
        # Hydra's own words, and paths, are left to Hydra.
        if isinstance(base, str) and base[0] not in "_/" and base not in known:
            raise InputError(f"{file}: defaults: {names.unknown(group, base, known)}")
    # Without this line Hydra would put the keys into a section of the group's name.
    presets = {each for kind in VERBS.values() for each in kind.presets}
    if group in presets and PACKAGE not in file.read_text(encoding="utf-8"):
        raise InputError(
            f"--config-dir: {file}: expected the first line '# {PACKAGE} _global_', "
            "got none"
        )
