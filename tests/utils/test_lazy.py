"""Lazy exports: type checkers see what Python finds, and nothing loads early."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from marl_pool.utils.lazy import lazy_exports

PACKAGES = ("pooling", "encoders", "policies", "perturbations")


def exported_to_type_checkers(package: str) -> set[str]:
    """The names that ``__init__.py`` re-exports as ``import Name as Name``."""
    file = importlib.import_module(package).__file__
    assert file is not None
    imports = (
        node
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    )
    return {
        alias.name
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }


@pytest.mark.parametrize("room", PACKAGES)
def test_type_checkers_see_the_classes_that_python_finds(room):
    package = importlib.import_module(f"marl_pool.{room}")
    promised = exported_to_type_checkers(package.__name__)
    values = {name: getattr(package, name) for name in dir(package)}
    classes = {name: value for name, value in values.items() if isinstance(value, type)}
    ours = {n for n, c in classes.items() if c.__module__.startswith(package.__name__)}
    assert promised == ours
    assert {getattr(package, name).__name__ for name in promised} == promised


@pytest.mark.parametrize("room", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(room):
    package = importlib.import_module(f"marl_pool.{room}")
    with pytest.raises(AttributeError, match=rf"marl_pool\.{room}.*Nothing"):
        _ = package.Nothing


def test_a_name_is_imported_once(monkeypatch):
    module = type(sys)("lazily")
    monkeypatch.setitem(sys.modules, "lazily", module)
    load, names = lazy_exports("lazily", ["json.decoder:JSONDecoder"])
    assert "JSONDecoder" in names()
    assert not hasattr(module, "JSONDecoder")
    assert load("JSONDecoder") is module.JSONDecoder is __import__("json").JSONDecoder


def test_importing_the_packages_loads_no_torch():
    source = f"import sys; import {', '.join(f'marl_pool.{p}' for p in PACKAGES)}"
    check = "; assert 'torch' not in sys.modules; from marl_pool.pooling import Pooling"
    done = subprocess.run(
        [sys.executable, "-c", source + check + "; assert 'torch' in sys.modules"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
