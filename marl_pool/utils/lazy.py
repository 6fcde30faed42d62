"""Lazy exports: a package offers names that it imports when they are first used."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def reexports(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports as itself.

    Args:
        package: ``__name__`` of the package. Its file has these names once, for type
            checkers, editors and `lazy_exports`: ``from module import Name as Name``.
    """
    imports = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[package])))
        if isinstance(node, ast.ImportFrom)
    )
    return {
        alias.name: node.module or ""
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }


def lazy_exports(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Importing the package stays cheap: ``from marl_pool.pooling import Pooling`` loads
    torch, ``import marl_pool.pooling`` does not. The names are its `reexports` under
    ``TYPE_CHECKING``.
    """
    modules = reexports(package)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # found without `load` from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, names
