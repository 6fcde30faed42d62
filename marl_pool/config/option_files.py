"""The YAML files of options: of the library, of installed packages, of the user."""

import functools
from collections.abc import Iterator, Mapping
from importlib.resources import files as package_files
from itertools import takewhile
from pathlib import Path
from typing import Any

from marl_pool.config.sections import built_in
from marl_pool.files.reading import read_yaml
from marl_pool.options import names
from marl_pool.options.plugins import installed
from marl_pool.options.signatures import show
from marl_pool.utils.errors import InputError, explain_os_errors

CONFIGS = Path(str(package_files("marl_pool"))) / "configs"
"""The YAML files inside the package, a folder for each group."""
DEFAULTS_KEY = "defaults"
"""Key of a YAML file that lists what it builds on: ``- OPTION`` of the same group,
whose keys come first, and ``- GROUP: OPTION`` for other groups."""


def is_packaged(file: Path) -> bool:
    """Return whether a YAML file is the library's or an installed package's."""
    return any(file.is_relative_to(folder) for folder in _folders().values())


@functools.cache
def _folders() -> dict[str, Path]:
    """Return the folders of YAML files, by package."""
    packages = {label: plugins.configs for label, plugins in installed().items()}
    return {"marl_pool": CONFIGS} | {k: path for k, path in packages.items() if path}


@functools.cache
def _packaged() -> dict[str, dict[str, Path]]:
    """Return the packages' YAML files, by group and option.

    Raises:
        InputError: two packages have a file of one name.
    """
    options_of_group: dict[str, dict[str, Path]] = {}
    for label, folder in _folders().items():
        for file in sorted(folder.rglob("*.yaml")):
            group, *parts = file.relative_to(folder).with_suffix("").parts
            option, options = "/".join(parts), options_of_group.setdefault(group, {})
            if option in options:
                raise InputError(f"{label}: {file}: {options[option]} already exists")
            options[option] = file
    return options_of_group


def files_of(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Return the YAML files of a config group, by option, the user's own included."""
    options = dict(_packaged().get(group, {}))
    if config_dir is not None:
        folder = config_dir / group
        for file in sorted(folder.rglob("*.yaml")):
            if file.name.startswith("."):
                continue  # an editor's lock or backup
            options[file.relative_to(folder).with_suffix("").as_posix()] = file
    return options


def bases_first(
    group: str,
    option: str,
    files: Mapping[str, Path],
    descendants: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield the options that an option builds on, in order, then the option itself.

    Args:
        group: config group of all of them.
        option: the option.
        files: YAML files of the group; see `files_of`.
        descendants: options that build on this one.

    Raises:
        InputError: an option that does not exist, or that builds on itself.
    """
    descendants = (*descendants, option)
    for base in bases_in(content_of(files[option])) if option in files else ():
        # Two options may build on the same one, which then comes twice.
        if base in descendants:
            raise InputError(
                f"{files[option]}: defaults: expected another {group}, got {base}: it "
                "builds on itself"
            )
        if base not in files and base not in built_in(group):
            raise InputError(
                f"{files[option]}: defaults: "
                f"{names.unknown(group, base, {*built_in(group), *files})}"
            )
        yield from bases_first(group, base, files, descendants)
    yield option


def summary_of(file: Path) -> str:
    """Return the first sentence of the comment at the top of a preset's file."""
    lines = takewhile(
        lambda line: line.startswith("# "), file.read_text("utf-8").splitlines()
    )
    text = " ".join(line.removeprefix("# ") for line in lines)
    return text.partition(". ")[0].partition(": ")[0].removesuffix(".") + "."


def bases_in(content: Mapping[str, Any]) -> list[str]:
    """List the options of the same group that a file builds on."""
    return [entry for entry in content.get(DEFAULTS_KEY, ()) if isinstance(entry, str)]


def choices_in(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the options of groups that a file chooses."""
    choices: dict[str, str | None] = {}
    for entry in content.get(DEFAULTS_KEY, ()):
        choices |= entry if isinstance(entry, Mapping) else {}
    return choices


def content_of(file: Path) -> dict[str, Any]:
    """Read the keys of a YAML file; raise an `InputError` that names the file."""
    # Each composition asks for all presets, and a package's own never change.
    reader = _read if is_packaged(file) else _read.__wrapped__
    return reader(file)


@functools.cache
def _read(file: Path) -> dict[str, Any]:
    with explain_os_errors(f"{file} cannot be read"):  # a link to nothing
        content = read_yaml(file) or {}  # checks its size too
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected a mapping of keys, got {show(content):.80}")
    entries = content.get(DEFAULTS_KEY, [])
    if not isinstance(entries, list):
        raise InputError(f"{file}: defaults: expected a list, got {show(entries):.80}")
    for entry in entries:
        options = entry.values() if isinstance(entry, dict) else [entry]
        if not all(option is None or isinstance(option, str) for option in options):
            raise InputError(
                f"{file}: defaults: expected OPTION or GROUP: OPTION, "
                f"got {show(entry):.80}"
            )
    return content
