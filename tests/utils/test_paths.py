from pathlib import Path

import pytest

from marl_pool.config.compose import compose
from marl_pool.runs.sweep import Sweep, read_table
from marl_pool.utils.paths import user_path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_tilde_is_the_home_folder(home):
    assert user_path("~/a") == home / "a"
    assert user_path(Path("~")) == home
    assert user_path("a/~") == Path("a/~")


def test_an_unknown_user_is_left():
    assert user_path("~nobody-of-this-name/a") == Path("~nobody-of-this-name/a")


def test_a_sweep_and_its_table_are_found_in_the_home_folder(home):
    sweep = Sweep("~/s", {"seed": ["0", "1"]}, [], "~/configs")
    assert sweep.path == home / "s"
    assert sweep.config_dir == str(home / "configs")
    sweep.path.mkdir()
    sweep.write()
    assert Sweep.is_at("~/s")
    assert Sweep.open("~/s").grid == sweep.grid
    (home / "s" / "table.csv").write_text("name,seed\na,0\n")
    assert read_table("~/s") == read_table(home / "s")


def test_option_files_are_found_in_the_home_folder(home):
    (home / "pooling").mkdir()
    (home / "pooling" / "corner.yaml").write_text("name: ada\nquery: [0]\n")
    assert compose("train", ["pooling=corner"], "~")["pooling"]["query"] == [0]
