"""Registries: from a short name or ``package.module:Class`` to a class.

Importing a module runs its code. A name typed by the user, or passed in Python, may be
imported. A name in a file may not: files are read inside `trust`, where nothing outside
the package is imported unless the caller lists it.
"""

import difflib
import importlib
import inspect
import json
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from marl_pool.utils.errors import InputError
from marl_pool.utils.text import quoted, single_line

VARIABLE = "MARL_POOL_TRUSTED"
"""Environment variable that passes the restriction to child processes. It can only
restrict: without it a process imports what its user names."""
THIRD_PARTY = re.compile(
    r"(?P<gymnasium>[\w-]+-v\d+)|[\w.]+:[\w./-]+|[\w-]+/[\w-]+-v\d+|\w+(\.\w+)+"
)
"""Ids and modules of other libraries' environments, for messages."""


class UntrustedError(InputError):
    """A file names a class or module that is not the package's and not allowed."""


class _Trust(NamedTuple):
    """Allowed plug-ins, and the arguments of `trust` for messages about the others."""

    plugins: frozenset[str] = frozenset()
    source: str = "a file"
    command: str = ""
    required: tuple[str, ...] = ()


def _inherited() -> _Trust | None:
    inherited = os.environ.get(VARIABLE)
    if inherited is None:
        return None
    try:
        plugins, source, command, *_ = json.loads(inherited)
        return _Trust(frozenset(plugins), str(source), str(command))
    except (ValueError, TypeError):
        return _Trust()


_restriction: ContextVar[_Trust | None] = ContextVar(
    "restriction",
    default=_inherited(),  # noqa: B039  immutable
)


@contextmanager
def trust(
    plugins: Iterable[str],
    source: object = None,
    command: str = "",
    config: object = None,
) -> Iterator[None]:
    """Restrict imports by name to the package's own classes and ``plugins``.

    Enter it before using anything that was read from a file. Inside another `trust`
    only names that both list are allowed. A thread that uses names read from a file has
    to run in a copy of the context (`contextvars.copy_context`).

    Args:
        plugins: ``package.module:Class`` or module names, exactly as the file has them.
        source: the file or folder, for messages; by default the outer `trust`'s.
        command: the command to repeat with ``--plugin``, for messages; by default the
            outer `trust`'s.
        config: the file's content, so that a message names all that has to be allowed;
            by default the outer `trust`'s.

    Raises:
        InputError: ``plugins`` is not a list of names.
    """
    is_list = isinstance(plugins, Iterable) and not isinstance(plugins, str)
    names = [*plugins] if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"plugins: expected a list of package.module:Class, got {plugins!r}"
        )
    # Inside another restriction, both apply.
    outer, allowed = _restriction.get(), frozenset(names)
    if outer is not None:
        allowed &= outer.plugins
    inherited = outer or _Trust()
    origin = inherited.source if source is None else str(source)
    required = (
        inherited.required if config is None else tuple(sorted(plug_ins_in(config)))
    )
    token = _restriction.set(
        _Trust(allowed, origin, command or inherited.command, required)
    )
    try:
        yield
    finally:
        _restriction.reset(token)


def is_restricted() -> bool:
    """Return whether a `trust` is active."""
    return _restriction.get() is not None


def allowed() -> frozenset[str]:
    """Return the plug-ins of the active `trust`; empty without one."""
    return (_restriction.get() or _Trust()).plugins


def inheritance() -> dict[str, str]:
    """Return environment variables that restrict a child process like this one."""
    restriction = _restriction.get()
    if restriction is None:
        return {}
    return {VARIABLE: json.dumps([sorted(restriction.plugins), *restriction[1:]])}


def validate_trusted(name: str, kind: str) -> None:
    """Raise `UntrustedError` for a name that an active `trust` does not list."""
    restriction = _restriction.get()
    if restriction is None or name in restriction.plugins:
        return
    # Name all that is missing at once. Python and the command line allow names in
    # different ways.
    untrusted = [
        plug_in
        for plug_in in restriction.required
        if plug_in not in restriction.plugins
    ]
    missing = list(dict.fromkeys([name, *untrusted]))
    flags = " ".join(f"--plugin {quoted(plug_in)}" for plug_in in missing)
    remedy = f"plugins={missing} or {flags}"
    if restriction.command:
        remedy = f"{restriction.command} {flags}"
    raise UntrustedError(
        f"{restriction.source} uses the {kind} {name!r}, which is not part of "
        f"marl_pool; if you trust it, allow it: {remedy}"
    )


def plug_ins_in(config: object) -> set[str]:
    """Return the plug-ins in a configuration: classes, and modules of environments."""
    env = config.get("env") if isinstance(config, Mapping) else None
    module = env.get("module") if isinstance(env, Mapping) else None
    plug_ins = {name for name in texts_in(config) if is_plug_in(name)}
    return plug_ins | ({module} if isinstance(module, str) else set())


def is_plug_in(name: str) -> bool:
    """Return whether ``name`` has the form ``package.module:Class``."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def short_name(name: str) -> str:
    """Return ``Class`` for ``package.module:Class``, and other names unchanged."""
    return name.rpartition(":")[2]


def texts_in(value: object) -> set[str]:
    """Return all strings in nested lists and values of mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return set().union(*map(texts_in, value))
    return {str(value)} if isinstance(value, str) else set()


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that a misspelt name may mean; empty if there is none.

    That is the most similar one, or else the longest whose words, joined by
    underscores, are all in the name: ``clip`` for ``clip_param``.
    """
    names = sorted(choices)
    similar = difflib.get_close_matches(name, names, n=1)
    words = {*name.split("_")}
    inside = [choice for choice in names if {*choice.split("_")} <= words]
    return next(iter(similar), "") or max(inside, key=len, default="")


def unknown(kind: str, name: object, choices: Iterable[str]) -> InputError:
    """Build the error for an unknown name, with the choices and the nearest one."""
    names = sorted(choices)
    if not names:
        return InputError(f"unknown {kind} {name!r}: there is none")
    near = nearest(str(name), names)
    hint = f" Did you mean {near!r}?" if near else ""
    if kind == "env" and THIRD_PARTY.fullmatch(str(name)):
        hint = f" {_foreign_env(str(name))}"
    return InputError(f"unknown {kind} {name!r}: choose from {', '.join(names)}.{hint}")


def _foreign_env(name: str) -> str:
    """Say how an environment of another library is chosen."""
    match = THIRD_PARTY.fullmatch(name)
    library = "gymnasium:" if match and match["gymnasium"] else ""
    return (
        f"One of Gymnasium or PettingZoo is env=pettingzoo env.module={library}{name}"
    )


def target(name: str, registry: Mapping[str, str], kind: str) -> str:
    """Return the ``package.module:Class`` of a name, which may have that form."""
    if not isinstance(name, str):
        raise InputError(f"{kind}: expected a name, got {name!r:.80}")
    if name in registry:
        return registry[name]
    if is_plug_in(name):
        return name
    raise unknown(kind, name, registry)


def resolve(name: str, registry: Mapping[str, str], kind: str, base: type) -> type:
    """Import the class behind ``name`` and check that it is a ``base``.

    Raises:
        InputError: no such class, not a subclass of ``base``, or abstract.
        UntrustedError: the name is in a file and not allowed; see `trust`.
    """
    module_name, _, attribute = target(name, registry, kind).partition(":")
    # The import runs code, so the name has to be trusted first.
    if name not in registry:
        validate_trusted(name, kind)
    # Import the module, which may raise any exception.
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{kind} {name!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        # The command line shows no traceback, so name the line that raised. The
        # message of a SyntaxError names it already.
        reason = single_line(f"{type(error).__name__}: {error}")
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({last.filename}:{last.lineno})"
        raise InputError(
            f"{kind} {name!r} cannot be imported: {reason:.200}"
            f"{'' if isinstance(error, SyntaxError) else place}"
        ) from error
    if not hasattr(module, attribute):
        raise InputError(f"{kind} {name!r}: {module_name} has no {attribute!r}")
    member = getattr(module, attribute)
    # Check that it is a class of this kind that can be constructed.
    if not (isinstance(member, type) and issubclass(member, base)):
        hint = f". {_foreign_env(name)}" if kind == "env" else ""
        raise InputError(
            f"{kind} {name!r} must be a subclass of "
            f"{base.__module__}.{base.__name__}, got {member!r}{hint}"
        )
    if inspect.isabstract(member):
        missing = ", ".join(sorted(vars(member)["__abstractmethods__"]))
        raise InputError(
            f"{kind} {name!r} is abstract: it does not implement {missing}"
        )
    return member


def name_of(cls: type, registry: Mapping[str, str]) -> str:
    """Return the name by which `resolve` finds ``cls``."""
    full_name = f"{cls.__module__}:{cls.__qualname__}"
    return next(
        (name for name, target in registry.items() if target == full_name), full_name
    )
