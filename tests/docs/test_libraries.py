"""The page "In your library": its code runs from top to bottom."""

import re

from helpers.paths import ROOT

PAGE = ROOT / "docs" / "libraries" / "index.md"


def test_its_code_runs(capsys) -> None:
    text = PAGE.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "every token has its own place" in printed  # of a vector
    assert "(8, 2)" in printed  # of the padded tokens
    assert "'self', 'row'" in printed
