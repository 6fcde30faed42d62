"""Installed packages of plug-ins: what they add, and which are refused."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.paths import ROOT
from marl_pool.cli.main import main
from marl_pool.config import option_files
from marl_pool.options import plugins
from marl_pool.pooling import POOLING, make_pooling, pooling_names

CODE = """
from pathlib import Path
from marl_pool.options.plugins import PluginCommand, Plugins

PLUGINS = Plugins(
    registries={"pooling": {"loudest": "garden.heads:Loudest"}},
    configs=Path(__file__).with_name("configs"),
    commands={"water": PluginCommand(
        "water the garden",
        "garden.heads:water",
        "examples:\\n  marl-pool water 3",
        {"litres": {"type": int, "help": "litres"}},
    )},
)
"""
HEADS = '''
from marl_pool.pooling.basic import MaxPooling

class Loudest(MaxPooling):
    """The loudest plant."""

def water(arguments, overrides):
    print(f"{arguments.litres} litres")
    return 0
'''
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package named ``garden``, and forget it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    caches = (plugins.installed, option_files._folders, option_files._packaged)

    def write(code: str = CODE, target: str = "garden.plugin:PLUGINS") -> Path:
        package, metadata = tmp_path / "garden", tmp_path / "garden-1.0.dist-info"
        package.mkdir()
        metadata.mkdir()
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(code)
        (package / "heads.py").write_text(HEADS)
        (package / "configs" / "pooling").mkdir(parents=True)
        (package / "configs" / "pooling" / "loud.yaml").write_text(
            "# Loud.\ndefaults:\n  - loudest\n"
        )
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: garden\nVersion: 1.0\n"
        )
        entry = f"[marl_pool.plugins]\nplants = {target}\n"
        (metadata / "entry_points.txt").write_text(entry)
        for cache in caches:
            cache.cache_clear()
        return package

    yield write
    for cache in caches:
        cache.cache_clear()
    for module in ("garden", "garden.plugin", "garden.heads"):
        sys.modules.pop(module, None)


def test_names_files_and_verbs_of_a_package_are_found(install, refused, capsys):
    install()
    assert "loudest" in pooling_names()
    assert type(make_pooling("loudest", dim=4)).__name__ == "Loudest"
    assert main(["list", "pooling"]) == 0
    assert re.search("loudest +The loudest plant.", capsys.readouterr().out)
    assert main(["train", "--cfg", "pooling=loud"]) == 0
    assert "\n  name: loudest\n" in capsys.readouterr().out
    assert main(["water", "3"]) == 0
    assert capsys.readouterr().out == "3 litres\n"
    assert "water takes no keys" in refused("water", "3", "env=pong")


PLANTS = "garden.plugin:PLUGINS"


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        ("1 / 0", PLANTS, "ZeroDivisionError: division by zero"),
        ("", PLANTS, "AttributeError: module 'garden.plugin' has no"),
        ("", "garden.nothing:PLUGINS", "ModuleNotFoundError: No module named 'gard"),
        ("PLUGINS = 3", PLANTS, "expected a marl_pool.options.plugi"),
        (CODE.replace('"pooling": {', '"pool": {'), PLANTS, "expected kinds of analys"),
        (CODE.replace('"loudest"', '"ada"'), PLANTS, "pooling 'ada' is registered alr"),
        (CODE.replace('"water"', '"train"'), PLANTS, "verb 'train' is registered alre"),
    ],
)
def test_a_broken_package_is_named_in_one_line(install, refused, code, target, message):
    install(code, target)
    err = refused("list", "pooling")
    assert f"garden, entry point plants = {target}: " in err
    assert message in err


def test_two_packages_may_not_have_a_file_of_one_name(install, refused):
    package = install()
    loud = package / "configs" / "pooling" / "loud.yaml"
    loud.rename(loud.with_stem("ada_corner"))
    err = refused("train", "--cfg")
    assert "garden, entry point plants" in err
    assert "ada_corner.yaml already" in err


def test_built_in_names_need_no_package(install: Install) -> None:
    """A broken package does not keep the library's own classes from being used."""
    install("1 / 0")
    assert POOLING["ada"] == "marl_pool.pooling.ada:AdaPooling"
    make_pooling("max", dim=4)


def test_the_library_does_not_name_the_studies() -> None:
    files = [
        file
        for suffix in ("py", "yaml")
        for file in (ROOT / "marl_pool").rglob(f"*.{suffix}")
    ]
    assert len(files) > 200
    assert not [f for f in files if "marl_pool_studies" in f.read_text("utf-8")]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "garden.shed:water",
            "plug-in garden.shed:water: there is no module garden.shed",
        ),
        ("meadow.heads:water", "there is no module meadow"),
        ("garden.heads:mow", "garden.heads has no mow"),
    ],
)
def test_a_verb_that_is_not_there_is_named(install, refused, target, words):
    install(CODE.replace("garden.heads:water", target))
    assert words in refused("water", "3")
