"""The check of names, docstrings and prose."""

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


MODULE = '''"""A module.

Its size is that of a box, with a color of its own; None: no
limit, and those
of others.
"""

# that of nobody
def move(given, speed=1):
    """Move."""
    for each in given:
        _own, left_edge = each, "that of a string"
    return [one.x for one in given]
'''


def test_measures_name_each_vague_name_and_phrase(words, tmp_path):
    path = tmp_path / "box.py"
    path.write_text(MODULE)
    names, that_of, of_its_own, none = words.measures(tmp_path)
    assert sorted(names.places) == sorted(
        f"{path}:{line}: {name}"
        for line, name in [(9, "given"), (11, "each"), (12, "_own"), (13, "one")]
    )
    assert names.total == 6
    assert sorted(that_of.places) == [
        f"{path}:3: 'that of'",
        f"{path}:4: 'those\\nof'",
        f"{path}:8: 'that of'",
    ]
    assert of_its_own.places == [f"{path}:3: 'of its own'"]
    assert none.places == [f"{path}:3: '; None:'"]
    assert none.total == 27


@pytest.mark.parametrize(("count", "is_met"), [(2, True), (3, False)])
def test_two_vague_names_in_a_thousand_are_allowed(words, tmp_path, count, is_met):
    lines = [f"name_{number} = 0" for number in range(1_000 - count)]
    lines += ["found = 0"] * count
    (tmp_path / "many.py").write_text("\n".join(lines))
    assert words.measures(tmp_path)[0].is_met is is_met
