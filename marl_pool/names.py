"""From a name to a class: literal registries, plug-ins, helpful refusals.

A registry maps a short name to ``"package.module:Class"``, so that a listing loads
nothing heavy. Wherever a registered name is accepted, ``package.module:Class`` of
the user's own is too.
"""

import difflib
import importlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from marl_pool.errors import InputError


def unknown(kind: str, name: object, choices: Iterable[str]) -> InputError:
    """Build the refusal of an unknown name, with the choices and the nearest one."""
    known = sorted(choices)
    if not known:
        return InputError(f"unknown {kind} {name!r}: there is none")
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {name!r}: choose from {', '.join(known)}.{hint}")


def target(name: str, registry: Mapping[str, str], kind: str) -> str:
    """Return the ``package.module:Class`` that ``name`` stands for.

    Raises:
        InputError: ``name`` is neither registered nor of that form.
    """
    if name in registry:
        return registry[name]
    module, _, attribute = str(name).partition(":")
    if all(part.isidentifier() for part in (*module.split("."), attribute)):
        return name
    raise unknown(kind, name, registry)


def resolve(name: str, registry: Mapping[str, str], kind: str, base: type) -> type:
    """Import the class behind ``name`` and check that it is a ``base``.

    Args:
        name: a key of ``registry`` or ``package.module:Class``.
        registry: short name to ``package.module:Class``.
        kind: what is being looked for, for messages ("pooling", "env", …).
        base: the class that the result must derive from.

    Raises:
        InputError: nothing of that name, or it is no ``base`` or an abstract one.
    """
    module_name, _, attribute = target(name, registry, kind).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{kind} {name!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        raise InputError(f"{kind} {name!r}: {module_name} has no {attribute!r}")
    found = getattr(module, attribute)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InputError(
            f"{kind} {name!r} must be a subclass of "
            f"{base.__module__}.{base.__name__}, got {found!r}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
        raise InputError(f"{kind} {name!r} is abstract: it does not write {missing}")
    return found


def name_of(cls: type, registry: Mapping[str, str]) -> str:
    """The name under which `resolve` finds ``cls``."""
    own = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, target in registry.items() if target == own), own)


def check_trusted(
    name: object,
    registry: Mapping[str, str],
    kind: str,
    plugins: Collection[str],
    source: object,
) -> None:
    """Refuse a class that a file names and nobody vouched for.

    Importing a module runs it, so what a file says is not enough.

    Args:
        name: what the file says.
        registry: the package's own names.
        kind: what is named, for messages.
        plugins: ``package.module:Class`` names that the user allows.
        source: the file or folder, for messages.

    Raises:
        InputError: ``name`` is neither the package's own nor allowed.
    """
    if not isinstance(name, str):
        raise InputError(f"{source} is damaged or foreign: no {kind} is named")
    if name not in registry and name not in plugins:
        raise InputError(
            f"{source} uses the {kind} {name!r}, which is not part of marl_pool; "
            f"if you trust it, allow it: plugins=[{name!r}] or --plugin {name}"
        )


def build(
    name: str,
    registry: Mapping[str, str],
    kind: str,
    base: type,
    options: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
) -> Any:
    """Construct what ``name`` stands for.

    Args:
        name: a key of ``registry`` or ``package.module:Class``.
        registry: short name to ``package.module:Class``.
        kind: what is being built, for messages.
        base: the class that the result must derive from.
        options: the user's keyword arguments.
        context: what the program knows (N, the width, …); an entry is passed on
            where the constructor has such a parameter and the user gave none.

    Raises:
        InputError: an unknown name, an unknown option, a missing one, or one of a
            type that the constructor cannot take.
    """
    cls = resolve(name, registry, kind, base)
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            raise unknown(f"option of {kind} {name!r}:", option, parameters)
    known = {k: v for k, v in (context or {}).items() if k in parameters}
    arguments = {**known, **options}
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if needed and parameter.name not in arguments:
            raise InputError(f"{kind} {name!r} needs the option {parameter.name!r}")
    try:
        return cls(**arguments)
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{kind} {name!r}: expected options of other types: {reason}"
        ) from error
