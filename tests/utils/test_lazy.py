"""Lazy exports: type checkers see what Python finds, and nothing loads early."""

import importlib
import json
import sys

import pytest

from marl_pool.encoders import ENCODERS
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.policies import POLICIES
from marl_pool.pooling import POOLING
from marl_pool.utils.lazy import reexports

PACKAGES = ("pooling", "encoders", "policies", "perturbations")


REGISTRIES = (POOLING, ENCODERS, POLICIES, PERTURBATIONS)


@pytest.mark.parametrize(
    ("room", "registry"), list(zip(PACKAGES, REGISTRIES, strict=True))
)
def test_every_registered_class_is_exported(room, registry):
    exports = reexports(f"marl_pool.{room}")
    for target in registry.built_in.values():
        module, _, name = target.partition(":")
        if module.startswith(f"marl_pool.{room}."):
            file = f"marl_pool/{room}/__init__.py"
            assert exports.get(name) == module, (
                f"import {name} under TYPE_CHECKING in {file}"
            )


@pytest.mark.parametrize("room", PACKAGES)
def test_exports_have_the_names_of_their_objects(room):
    package = importlib.import_module(f"marl_pool.{room}")
    for name in reexports(package.__name__):
        assert getattr(package, name).__name__ == name
        assert name in dir(package)


@pytest.mark.parametrize("room", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(room):
    package = importlib.import_module(f"marl_pool.{room}")
    with pytest.raises(AttributeError, match=rf"marl_pool\.{room}.*Nothing"):
        _ = package.Nothing


def test_a_name_is_imported_once(tmp_path, monkeypatch):
    (tmp_path / "lazily.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from marl_pool.utils.lazy import lazy_exports\n"
        "if TYPE_CHECKING:\n"
        "    from json.decoder import JSONDecoder as JSONDecoder\n"
        "    from json.encoder import JSONEncoder\n"
        "__getattr__, __dir__ = lazy_exports(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lazily")
    monkeypatch.setitem(sys.modules, "lazily", module)
    assert "JSONDecoder" in dir(module)
    assert "JSONDecoder" not in vars(module)
    assert module.JSONDecoder is json.JSONDecoder
    assert vars(module)["JSONDecoder"] is json.JSONDecoder
    assert not hasattr(module, "JSONEncoder")
