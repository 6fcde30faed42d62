"""The page of public environments: each row is what training gives today."""

import pytest
import zoo

pytestmark = [
    pytest.mark.slow,
    # Warnings of the collections themselves do not matter here.
    pytest.mark.filterwarnings("default"),
]

ENTRIES = [*zoo.entries()]


@pytest.fixture(autouse=True)
def _headless(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.module)
def test_a_row_of_the_page_is_what_a_training_gives(entry):
    rows = {line[0]: line for line in zoo.written()[entry.collection]}
    assert rows[entry.label] == zoo.row(entry)


def test_every_collection_has_its_rows_and_the_page_is_written_by_the_script():
    collections = zoo.written()
    assert [*collections] == [*zoo.COLLECTIONS, *zoo.IDS]
    assert zoo.PAGE.read_text(encoding="utf-8") == zoo.page(collections)
    # Every environment of the page is in the installed collection.
    for name in {entry.collection for entry in ENTRIES}:
        labels = {entry.label for entry in ENTRIES if entry.collection == name}
        assert labels == {line[0] for line in collections[name]}


def test_a_row_that_changed_is_told_of(monkeypatch, tmp_path, capsys):
    page = tmp_path / "zoo.md"
    page.write_text(zoo.PAGE.read_text().replace("| 4 × 1 | trains |", "| 9 × 1 | x |"))
    monkeypatch.setattr(zoo, "PAGE", page)
    assert zoo.main(["--check", "--only", "simple_v3"]) == 1
    assert "(new)" in capsys.readouterr().err
    assert zoo.main(["--only", "simple_v3"]) == 0
    assert zoo.main(["--check", "--only", "simple_v3"]) == 0
