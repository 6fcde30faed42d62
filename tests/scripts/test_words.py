"""The check of names and docstrings."""

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.fast


@pytest.fixture
def words(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return pytest.importorskip("words")


def test_findings_name_place_and_fault(words, tmp_path):
    (tmp_path / "one.py").write_text('"""What it is."""\n\nclass Box:\n    pass\n')
    (tmp_path / "two.py").write_text('"""A module."""\n\nclass _Box:\n    pass\n')
    opener, duplicate = words.findings(tmp_path)
    assert opener.startswith(f"{tmp_path / 'one.py'}:1: docstring opens with")
    assert duplicate.startswith(f"{tmp_path / 'one.py'}:3: class Box is also at")


def test_the_number_of_modules_is_that_of_a_folder_of_the_package(words, tmp_path):
    for root in (tmp_path / "marl_pool", tmp_path / "helpers"):
        root.mkdir()
        for number in range(21):
            (root / f"m{number}.py").touch()
    (finding,) = words.findings(tmp_path / "marl_pool")
    assert "21 modules, more than 20" in finding
    assert not list(words.findings(tmp_path / "helpers"))


def test_every_folder_exists_and_has_no_findings(words):
    for folder in words.FOLDERS:
        assert list((ROOT / folder).glob("*.py"))
        assert not list(words.findings(ROOT / folder))
