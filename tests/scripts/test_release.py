"""Release scripts: absolute links in the README, and its first example."""

import re

import pytest
from absolute_links import README, absolute
from first_example import first_block

from helpers.paths import ROOT

PLACE = ("https://example.org/user/name/", "v1.2.3")
BLOB, RAW = ("https://example.org/user/name/" + kind for kind in ("blob", "raw"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md)", f"[a]({BLOB}/v1.2.3/docs/a.md)"),
        ("[a](docs/a.md#part)", f"[a]({BLOB}/v1.2.3/docs/a.md#part)"),
        ("![a b](docs/a.webp)", f"![a b]({RAW}/v1.2.3/docs/a.webp)"),
        ("[all [of] it](LICENSE)", f"[all [of] it]({BLOB}/v1.2.3/LICENSE)"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
        ("[a](mailto:a@example.org)", "[a](mailto:a@example.org)"),
        ("[a](#below)", "[a](#below)"),
        ("x[0](docs)", f"x[0]({BLOB}/v1.2.3/docs)"),
    ],
)
def test_relative_targets_become_absolute(text, expected):
    assert absolute(text, *PLACE) == expected


def test_the_page_of_a_release_has_no_relative_target():
    text = README.read_text(encoding="utf-8")
    page = absolute(text, *PLACE)
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert all(target.startswith("https://") for target in targets), targets
    linked = re.findall(rf"(?:{BLOB}|{RAW})/v1\.2\.3/([^)#]+)", page)
    assert len(linked) > 10
    assert all((ROOT / path).exists() for path in linked)
    # Nothing else changes: code and prose stay.
    assert re.sub(rf"(?:{BLOB}|{RAW})/v1\.2\.3/", "", page) == text


def test_the_first_example_of_the_page_pools_a_set():
    names = {}
    exec(first_block(README.read_text(encoding="utf-8")), names)
    assert names["vector"].shape == (32, 64)
