"""Constructors' options, read without importing what they construct.

A configuration is checked against the signature of the class that it names. Importing
that class would bring torch, which takes seconds; a spelling mistake should be
answered at once. So the package's own classes are read from their source. A plug-in's
source may be anything: it is imported and inspected.
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from marl_pool.names import require_trusted

PACKAGE = "marl_pool"
LIGHT = {"marl_pool.types", "pydantic", "annotated_types"}
"""Modules outside the standard library that are imported, not read."""


ANY_OTHER = "**"
"""The name under which a constructor's ``**options`` is listed."""


class Option(NamedTuple):
    """A parameter of a constructor."""

    annotation: Any = Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is inspect.Parameter.empty


def options_of(target: str, omit: Set[str] = frozenset()) -> dict[str, Option]:
    """The named parameters of a class's constructor.

    Args:
        target: ``package.module:Class``.
        omit: parameters to leave out.

    Returns:
        By name; `ANY_OTHER` stands for a ``**options`` parameter.
    """
    module, _, name = target.partition(":")
    if module.split(".")[0] == PACKAGE:
        return options_in_source(module, name, omit)
    require_trusted(target, "class")
    return options_of_class(getattr(importlib.import_module(module), name), omit)


def options_of_class(cls: type, omit: Set[str] = frozenset()) -> dict[str, Option]:
    """The named parameters of an imported class's constructor."""
    try:
        signature = inspect.signature(cls, eval_str=True)
    except NameError:  # an annotation that only type checkers import
        signature = inspect.signature(cls)
    options = {}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            options[ANY_OTHER] = Option(_annotation(parameter), None)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            options[parameter.name] = Option(_annotation(parameter), parameter.default)
    return {name: option for name, option in options.items() if name not in omit}


def _annotation(parameter: inspect.Parameter) -> Any:
    written = parameter.annotation
    return Any if written is parameter.empty or isinstance(written, str) else written


def options_in_source(
    module: str, name: str, omit: Set[str] = frozenset()
) -> dict[str, Option]:
    """The named parameters of a constructor, read from its module's source."""
    found = _constructor(_source(module), name)
    if found is None:
        return {}
    source, arguments = found
    positional = [*arguments.posonlyargs, *arguments.args][1:]
    required = [None] * (len(positional) - len(arguments.defaults))
    pairs = [
        *zip(positional, [*required, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    options = {
        parameter.arg: Option(
            source.evaluate(parameter.annotation, Any),
            source.evaluate(default, inspect.Parameter.empty),
        )
        for parameter, default in pairs
        if parameter.arg not in omit
    }
    if arguments.kwarg:
        other = source.evaluate(arguments.kwarg.annotation, Any)
        options[ANY_OTHER] = Option(other, None)
    return options


def summary(target: str) -> str:
    """The first line of the docstring of ``package.module:Class``."""
    module, _, name = target.partition(":")
    found = _source(module).class_named(name)
    text = ast.get_docstring(found[1]) if found else None
    return (text or "").partition("\n")[0]


class _Source(dict[str, Any]):
    """A module's source, and the values of its names, evaluated when asked for."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no source of {module}")
        self.tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        self.imports = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for alias in node.names
        }
        self.modules = {
            alias.asname or alias.name
            for node in self.tree.body
            if isinstance(node, ast.Import)
            for alias in node.names
        }

    def __missing__(self, name: str) -> Any:
        if name in self.modules & sys.stdlib_module_names:
            return importlib.import_module(name)
        if name in self.imports:
            module, original = self.imports[name]
            root = module.split(".")[0]
            if module in LIGHT or root in sys.stdlib_module_names:
                return getattr(importlib.import_module(module), original)
            if root == PACKAGE:
                return _source(module)[original]
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return self.evaluate(node.value)
        raise KeyError(name)

    def evaluate(self, node: ast.expr | None, absent: Any = None) -> Any:
        if node is None:
            return absent
        code = compile(ast.Expression(node), "<signature>", "eval")
        return eval(code, {"__builtins__": builtins}, self)  # our own source

    def class_named(self, name: str) -> tuple["_Source", ast.ClassDef] | None:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
        module, original = self.imports.get(name, ("", ""))
        if module.split(".")[0] != PACKAGE:
            return None
        return _source(module).class_named(original)


@cache
def _source(module: str) -> _Source:
    return _Source(module)


def _constructor(source: _Source, name: str) -> tuple[_Source, ast.arguments] | None:
    found = source.class_named(name)
    if found is None:
        return None
    source, node = found
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return source, statement.args
    inherited = (_constructor(source, ast.unparse(base)) for base in node.bases)
    return next(filter(None, inherited), None)
