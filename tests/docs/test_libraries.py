"""The pages "In your library": their code runs from top to bottom."""

import re
from typing import Any

import pytest
import torch

from helpers.paths import ROOT

FOLDER = ROOT / "docs" / "libraries"


def run_page(name: str) -> dict[str, Any]:
    """Run the code of a page; return its names."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(block, name, "exec"), names)
    return names


def test_the_code_of_the_index_runs(capsys) -> None:
    run_page("index")
    printed = capsys.readouterr().out
    assert "every token has its own place" in printed  # of a vector
    assert "(8, 2)" in printed  # of the padded tokens
    assert "'self', 'row'" in printed


@pytest.mark.filterwarnings("ignore")  # TorchRL's own, when it is imported
def test_the_code_for_torchrl_gives_the_shapes_that_it_names() -> None:
    pytest.importorskip("torchrl")
    values = run_page("torchrl")["values"]
    assert isinstance(values, torch.Tensor)
    assert values.shape == (16, 3, 1)
