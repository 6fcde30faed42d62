"""From a name and options to an object: the place where options are checked."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from marl_pool.options.names import resolve, unknown
from marl_pool.options.signatures import (
    ANY_OTHER,
    check_argument,
    check_instance,
    check_sizes,
    describe,
    options_of,
    unknown_key,
)
from marl_pool.options.types import Part
from marl_pool.utils.errors import InputError, first_line

PACKAGE = __name__.partition(".")[0]


def build(
    name: str,
    registry: Mapping[str, str],
    kind: str,
    base: type,
    options: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
) -> Any:
    """Construct the class registered as ``name``.

    Args:
        name: a key of ``registry`` or ``package.module:Class``.
        registry: short name to ``package.module:Class``.
        kind: the config group, for messages.
        base: the class that the result must derive from.
        options: the user's keyword arguments, checked against the annotations.
        context: values that the program knows (N, the width, …); an entry is passed on
            where the constructor has such a parameter and the user gave none.

    Raises:
        InputError: an unknown name, an unknown option, a missing one, a value that
            does not fit its annotation, or a number above its `AtMost`.
    """
    # Check the user's options against the signature.
    cls = resolve(name, registry, kind, base)
    accepted = options_of(cls)
    for key, value in options.items():
        option = accepted.get(key, accepted.get(ANY_OTHER))
        if option is None:
            raise unknown(f"option of {kind} {name!r}:", key, accepted)
        check_argument(f"{kind}.{key}", value, option.annotation)
    # Add what the program knows.
    arguments = {k: v for k, v in (context or {}).items() if k in accepted} | {
        **options
    }
    check_sizes(kind, arguments, accepted)
    # Check that nothing required is missing.
    for key, option in accepted.items():
        if option.required and key not in arguments:
            raise InputError(
                f"{kind} {name!r} needs the option {key!r}: "
                f"expected {describe(option.annotation)}"
            )
    # A user's class may raise a TypeError itself.
    try:
        return cls(**arguments)
    except TypeError as error:
        reason = first_line(error)
        # A constructor with ``**options`` may pass on what nothing takes.
        for key in options.keys() - accepted.keys():
            if f"unexpected keyword argument {key!r}" in reason:
                accepted_keys = accepted.keys() - {ANY_OTHER, *(context or {})}
                raise unknown_key(f"{kind}.{key}", accepted_keys) from error
        raise InputError(
            f"{kind} {name!r}: expected options of other types: {reason}"
        ) from error


def with_name(part: Part) -> dict[str, Any]:
    """Return a part, perhaps given by its name alone, as ``{"name": …, **options}``."""
    return {"name": part} if isinstance(part, str) else dict(part)


def check_constructor(cls: type[Any], kind: str) -> None:
    """Make the constructor of a class of the package check its arguments.

    So ``AdaPooling(dim="8")`` is explained as well as ``make_pooling("ada", dim="8")``.
    Call it in ``__init_subclass__``. A user's class is left unchanged: its annotations
    may be mere hints.

    Args:
        cls: a class; nothing is done unless it defines a constructor.
        kind: the config group, for messages.
    """
    if "__init__" not in vars(cls) or cls.__module__.partition(".")[0] != PACKAGE:
        return
    construct = cls.__init__

    @wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        # Python itself reports too many arguments, and unknown ones.
        options = options_of(cls)
        for key, value in {**dict(zip(options, args, strict=False)), **kwargs}.items():
            if key in options:
                check_instance(f"{kind}.{key}", value, options[key].annotation)
        construct(self, *args, **kwargs)

    cls.__init__ = checked
