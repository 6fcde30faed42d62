"""Packages of plug-ins, which add to registries, configurations and commands.

A package names one `Plugins` in the entry-point group ``marl_pool.plugins``. It holds
only text, so that listing what is installed imports nothing heavy. Whoever installs a
package trusts it: its short names may be used in files, like the library's own. Other
plug-ins are named by the user, some of them in a file of trusted ones.
"""

import functools
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from marl_pool.utils.errors import InputError
from marl_pool.utils.text import single_line

GROUP = "marl_pool.plugins"
"""Entry-point group of the packages."""
KINDS = (
    "analysis",
    "encoder",
    "env",
    "evolution",
    "perturbation",
    "policy",
    "pooling",
    "task",
    "teacher",
    "tokenizer",
)
"""Kinds of registered names."""
LONGEST_FILE = 1 << 16
"""Largest size of the user's own list of plug-ins, in bytes."""
T = TypeVar("T")


@dataclass(frozen=True)
class PluginCommand:
    """A verb of the command line."""

    summary: str
    """One line of ``marl-pool --help``."""
    function: str
    """``module:function``, from parsed flags and overrides to the exit status."""
    epilog: str = ""
    """End of the verb's help; ``{keys}`` is replaced by its config groups."""
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments and flags, each with the options of ``argparse``'s ``add_argument``."""
    settings: str = ""
    """``module:Dataclass`` of its keys. Such a verb reads runs and takes the flags of
    ``evaluate``; without settings, a verb takes no keys."""


@dataclass(frozen=True)
class Plugins:
    """Additions of one package."""

    registries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By kind (`KINDS`), short name to ``package.module:Class``."""
    configs: Path | None = None
    """Folder of YAML files, laid out like the library's but with other names."""
    commands: Mapping[str, PluginCommand] = field(default_factory=dict)
    """Verbs of ``marl-pool``."""
    after_evaluation: str = ""
    """``module:function`` that each ``marl-pool evaluate`` calls at its end, from an
    `EvaluatedRun` to the paths of the files written."""


@functools.cache
def installed() -> dict[str, Plugins]:
    """Return the plug-ins of all installed packages, by package and entry point.

    Raises:
        InputError: an entry point that cannot be imported, or is not a `Plugins`.
    """
    packages = {}
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist else "a package"
        label = f"{package}, entry point {point.name} = {point.value}"
        try:
            plugins = point.load()
        except (Exception, SystemExit) as error:
            reason = single_line(f"{type(error).__name__}: {error}")
            raise InputError(f"{label}: cannot be imported: {reason:.200}") from error
        if not isinstance(plugins, Plugins):
            raise InputError(
                f"{label}: expected a {__name__}.Plugins, got {plugins!r:.80}"
            )
        if unknown := [kind for kind in plugins.registries if kind not in KINDS]:
            kinds = ", ".join(KINDS)
            raise InputError(f"{label}: expected kinds of {kinds}, got {unknown[0]!r}")
        packages[label] = plugins
    return packages


def user_plug_ins() -> list[str]:
    """Read the plug-ins that the user trusts everywhere, from the user's own file.

    It is ``marl_pool/plugins`` in ``$XDG_CONFIG_HOME``, by default ``~/.config``: one
    name per line, as for ``--plugin``; ``#`` begins a comment.

    Raises:
        InputError: a line that is neither a class nor a module, or no readable file.
    """
    from marl_pool.files.reading import read_bytes  # loads yaml

    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    file = Path(home) / "marl_pool" / "plugins"
    try:
        lines = read_bytes(file, LONGEST_FILE).decode("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    entries = [line.partition("#")[0].strip() for line in lines]
    for number, name in enumerate(entries, 1):
        if name and not re.fullmatch(r"[\w./-]+(:[\w./-]+)?", name):
            raise InputError(
                f"{file}: line {number}: expected package.module:Class, got {name!r}"
            )
    return [name for name in entries if name]


def commands() -> dict[str, PluginCommand]:
    """Return the verbs of all installed packages."""
    return {
        name: command
        for plugins in installed().values()
        for name, command in plugins.commands.items()
    }


def load(target: str) -> Any:
    """Import ``module:name`` of an installed package.

    Raises:
        InputError: no such module, or no such name in it.
    """
    module, _, name = target.partition(":")
    try:
        content = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a dependency of the module is missing
        raise InputError(f"plug-in {target}: there is no module {error.name}") from None
    if not hasattr(content, name):
        raise InputError(f"plug-in {target}: {module} has no {name}")
    return getattr(content, name)


class Registry(Mapping[str, T]):
    """Names of one kind: the library's, then those of installed packages.

    The packages are read when a name is not the library's.

    Args:
        kind: the kind, for messages.
        built_in: the library's own entries.
        read: returns a package's entries; by default its registry of this kind.
    """

    def __init__(
        self,
        kind: str,
        built_in: dict[str, T],
        read: Callable[[Plugins], Mapping[str, Any]] | None = None,
    ) -> None:
        self.kind, self.built_in = kind, built_in
        self.read = read or (lambda plugins: plugins.registries.get(kind, {}))

    def __getitem__(self, name: str) -> T:
        if name in self.built_in:
            return self.built_in[name]
        return self.added()[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.built_in, **self.added()})

    def __len__(self) -> int:
        return len(self.built_in) + len(self.added())

    def added(self) -> dict[str, T]:
        """Return the entries of installed packages.

        Raises:
            InputError: a name that is registered already.
        """
        entries: dict[str, T] = {}
        for label, plugins in installed().items():
            content: Mapping[str, Any] = self.read(plugins)
            if names := [name for name in content if name in self.built_in | entries]:
                raise InputError(
                    f"{label}: the {self.kind} {names[0]!r} is registered already"
                )
            entries |= content
        return entries
