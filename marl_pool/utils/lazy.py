"""Lazy exports: a package offers names that it imports when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any


def lazy_exports(
    package: str, targets: Iterable[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Importing the package stays cheap: ``from marl_pool.pooling import Pooling`` loads
    torch, ``import marl_pool.pooling`` does not. Import the same names under
    ``TYPE_CHECKING`` as well, where type checkers and editors look for them.

    Args:
        package: ``__name__`` of the package.
        targets: ``package.module:Name`` of each export.
    """
    # Map each name to the module that defines it.
    homes = {name: module for module, _, name in (t.partition(":") for t in targets)}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # found without `load` from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names
