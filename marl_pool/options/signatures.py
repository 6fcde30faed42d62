"""Options of constructors: read from signatures, checked, explained by docstrings."""

import ast
import importlib.util
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from marl_pool.options.names import nearest, unknown
from marl_pool.options.types import check_size
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import single_line

ANY_OTHER = "**"
"""The name under which a constructor's ``**options`` is listed."""


class Option(NamedTuple):
    """A parameter of a constructor."""

    annotation: Any = Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        """True if there is no default."""
        return self.default is inspect.Parameter.empty


def options_of(cls: type, omit: Set[str] = frozenset()) -> dict[str, Option]:
    """Return the named parameters of a class's constructor.

    `ANY_OTHER` stands for a ``**options`` parameter.

    Args:
        cls: a dataclass of settings, or any class with a constructor.
        omit: parameters to leave out.
    """
    return {
        name: option for name, option in _options_of(cls).items() if name not in omit
    }


@cache
def _options_of(cls: type) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for parameter in inspect.signature(cls).parameters.values():
        annotation = Any
        if parameter.annotation is not parameter.empty:
            scope = _scope_of(cls, parameter)
            annotation = _evaluated(parameter.annotation, scope)
        # A typed dictionary lists the unpacked options.
        if get_origin(annotation) is Unpack:
            options |= _passed_on(cls, *get_args(annotation))
        elif parameter.kind is parameter.VAR_KEYWORD:
            options[ANY_OTHER] = Option(annotation, None)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            options[parameter.name] = Option(annotation, parameter.default)
    # A signature has no value for a default factory.
    if is_dataclass(cls):
        for item in fields(cls):
            if item.default_factory is not MISSING and item.name in options:
                default = to_jsonable_python(item.default_factory())
                options[item.name] = options[item.name]._replace(default=default)
    return options


def _scope_of(cls: type[Any], parameter: inspect.Parameter) -> dict[str, Any]:
    """Return the global names of the module that wrote a parameter's annotation."""
    # The constructor of a dataclass repeats the annotations of its bases' fields.
    for base in cls.__mro__:
        declared = inspect.get_annotations(base).get(parameter.name)
        if declared == parameter.annotation and base.__module__ in sys.modules:
            return vars(sys.modules[base.__module__])
    return getattr(inspect.unwrap(cls.__init__), "__globals__", {})


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return an annotation without text; `Any`, which fits each value, if it fails.

    It fails where a class is imported only under ``TYPE_CHECKING``.
    """
    holder = SimpleNamespace(__annotations__={"option": annotation})
    try:
        return get_type_hints(holder, scope, include_extras=True)["option"]
    except Exception:  # whatever the text of a user's annotation raises
        return Any


def _passed_on(cls: type, shared: type[Any]) -> dict[str, Option]:
    """Return the options of a typed ``**common``, with the defaults of a base class."""
    scope = vars(sys.modules[shared.__module__])
    # The nearest base that has the parameter determines its default.
    bases = [options_of(base) for base in cls.__mro__[1:] if base is not object]
    return {
        name: Option(
            _evaluated(annotation, scope),
            next(options[name] for options in bases if name in options).default,
        )
        for name, annotation in shared.__annotations__.items()
    }


# Checking values


def check_options(
    where: str,
    section: Any,
    options: Mapping[str, Option],
    cls: type | None = None,
    context: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Check a mapping of keys to values; return it complete, in the options' order.

    Args:
        where: the section's key, for messages; empty at the top level.
        section: the composed section; None counts as an empty mapping.
        options: the allowed keys.
        cls: the class whose docstring explains a missing key.
        context: arguments that the program sets, which ``**options`` may not hold.

    Raises:
        InputError: an unknown or missing key, a wrong type or range.
    """
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise InputError(f"{where}: expected a mapping of keys, got {show(section)}")
    # Keys that no parameter names go to ``**options``, if any.
    allowed = {**options}
    fallback = allowed.pop(ANY_OTHER, None)
    for key in section:
        if key not in allowed:
            if fallback is None or key in context:
                raise unknown_key(join(where, key), options.keys() - {ANY_OTHER})
            allowed[key] = fallback
    checked = {}
    for key, option in allowed.items():
        full = join(where, key)
        if key in section:
            checked[key] = check_value(full, section[key], option.annotation)
            check_size(full, checked[key], option.annotation)
        elif option.required:
            first = meanings(cls).get(key, "").partition(". ")[0] if cls else ""
            meaning = first and f": {first.replace('``', '').rstrip('.')}"
            kind = describe(option.annotation).replace(WORDS[Any], "a value")
            raise InputError(f"{full}: expected {kind}; it has no default{meaning}")
        else:
            checked[key] = to_jsonable_python(option.default)
            try:
                check_value(full, checked[key], option.annotation)
            except InputError as error:
                raise InputError(f"the default of {error}") from error
    return checked


def check_sizes(
    where: str, arguments: Mapping[str, Any], options: Mapping[str, Option]
) -> None:
    """Check each argument against the bound in its annotation, if any."""
    for key in arguments.keys() & options.keys():
        check_size(f"{where}.{key}", arguments[key], options[key].annotation)


def check_settings(
    settings: type[Any], section: Any, where: str = ""
) -> dict[str, Any]:
    """Check the keys of a dataclass of settings, then run its constructor's checks."""
    checked = check_options(where, section, options_of(settings))
    settings(**checked)
    return checked


def check_value(key: str, value: Any, annotation: Any) -> Any:
    """Check one value against an annotation; return it as plain data.

    Strict as JSON is strict: a list serves as a tuple, a whole number as a float and
    1e6 as an integer, but neither ``"3"`` nor ``true`` is a number.
    """
    # A dataclass is a nested section.
    if isinstance(annotation, type) and is_dataclass(annotation):
        return check_settings(annotation, value, key)
    # Validate as JSON, which has the same types as YAML.
    try:
        text = json.dumps(_to_integers(value))
        fitting = _adapter(annotation).validate_json(text, strict=True)
    except TypeError as error:
        raise InputError(
            f"{key}: expected plain numbers, text, lists and mappings, got "
            f"{show(value):.200}"
        ) from error
    except ValidationError as error:
        raise _misfit(key, value, annotation) from error
    return to_jsonable_python(fitting)


def check_argument(key: str, value: Any, annotation: Any) -> None:
    """Check one argument of a constructor, which need not be plain data.

    Plain data is checked as by `check_value`, except that 1e6 is not an integer; other
    objects must be instances of what the annotation names.
    """
    if _is_dataclass(annotation) and isinstance(value, annotation):
        return
    # Build the validator of the annotation.
    try:
        adapter = _adapter(annotation)
    except PydanticSchemaGenerationError:  # a type that pydantic cannot check
        return
    # Arrays, modules and the like have no JSON; their type is checked.
    try:
        try:
            text = json.dumps(value, default=_to_plain)
        except (TypeError, ValueError):
            adapter.validate_python(value, strict=True)
        else:
            adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise _misfit(key, value, annotation) from error


def check_instance(key: str, value: Any, annotation: Any) -> None:
    """Check an argument as `check_argument`, but no mapping stands for a dataclass."""
    if _is_dataclass(annotation) and not isinstance(value, annotation):
        raise _misfit(key, value, annotation)
    check_argument(key, value, annotation)


def _is_dataclass(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


@cache
def _cached_adapter(annotation: Any) -> TypeAdapter[Any]:
    # Pydantic rejects a configuration for a dataclass, which may have its own.
    any_type = ConfigDict(arbitrary_types_allowed=True)
    config = None if _is_dataclass(annotation) else any_type
    return TypeAdapter(annotation, config=config)


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(annotation)
    except TypeError:  # metadata that cannot be hashed
        return _cached_adapter.__wrapped__(annotation)


def _misfit(key: str, value: Any, annotation: Any) -> InputError:
    # Only text is spelt, and "1" is not a misspelling of 1.
    near = nearest(value, _alternatives(annotation)) if isinstance(value, str) else ""
    hint = f". Did you mean {near!r}?" if near not in ("", value) else ""
    return InputError(
        f"{key}: expected {describe(annotation)}, got {show(value):.200}{hint}"
    )


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"no plain data: {type(value).__name__}")


def _to_integers(value: Any) -> Any:
    """Convert whole floats such as 1e6, which YAML reads as a float."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if isinstance(value, list):
        return [_to_integers(item) for item in value]
    return value


def join(where: str, key: object) -> str:
    """Return the dotted key in a section; the key itself at the top level."""
    return f"{where}.{key}" if where else str(key)


def unknown_key(key: str, choices: Collection[str]) -> InputError:
    """Build the error for an unknown dotted key."""
    section, _, short = key.rpartition(".")
    if not choices:
        return InputError(f"{key}: this {section} takes no options")
    return InputError(f"{key}: {unknown('key', short, choices)}")


# Words


def describe(annotation: Any) -> str:
    """Describe the values that fit, such as ``an integer >= 0 or null``."""
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
    return [WORDS.get(annotation, str(getattr(annotation, "__name__", annotation)))]


def _annotated(annotation: Any, metadata: Iterable[Any]) -> str:
    # Collect the bounds of a number.
    low = high = start = end = ""
    for item in metadata:
        if isinstance(item, FieldInfo) and item.description:
            return item.description
        for constraint in item.metadata if isinstance(item, FieldInfo) else [item]:
            match constraint:
                case Ge(bound):
                    low, start = f" >= {bound}", f"[{bound}"
                case Gt(bound):
                    low, start = f" > {bound}", f"({bound}"
                case Le(bound):
                    high, end = f" <= {bound}", f"{bound}]"
                case Lt(bound):
                    high, end = f" < {bound}", f"{bound})"
    # Write an interval if there are both bounds.
    interval = f" in {start}, {end}" if low and high else low + high
    return describe(annotation) + interval


def show(value: Any) -> str:
    """Return a value as it would be written in YAML, strings in quotes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)


# Docstrings

SECTION = re.compile(r"^(?:Args|Attributes|Returns|Raises|Yields):$", re.M)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.M)


def meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each option, on one line.

    It is read from the section ``Args`` in the docstrings of a class and its bases, and
    from the text below a field of a dataclass.
    """
    by_name: dict[str, str] = {}
    for base in cls.__mro__:
        # The entries between "Args:" and the next section.
        docstring = inspect.cleandoc(base.__doc__ or "")
        _, *sections = re.split(r"^Args:$", docstring, maxsplit=1, flags=re.M)
        entries = ENTRY.findall(SECTION.split(sections[0])[0]) if sections else []
        texts = _field_docstrings(base) if "__dataclass_fields__" in vars(base) else {}
        for name, text in [*entries, *texts.items()]:
            by_name.setdefault(name, single_line(text))
    return by_name


def _field_docstrings(cls: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docstrings = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docstrings[name] = text
    return docstrings


def summary(target: str) -> str:
    """Return the first line of the docstring of ``package.module:Class``.

    The source is read and nothing imported, so that a listing stays fast.
    """
    module, _, name = target.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
