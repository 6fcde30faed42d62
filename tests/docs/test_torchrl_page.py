"""The code of ``docs/libraries/torchrl.md`` runs."""

import re

import pytest
import torch

from helpers.paths import ROOT

PAGE = ROOT / "docs" / "libraries" / "torchrl.md"


@pytest.mark.filterwarnings("ignore")  # TorchRL's own, when it is imported
def test_the_code_of_the_page_gives_the_shapes_that_it_names() -> None:
    pytest.importorskip("torchrl")
    torch.manual_seed(0)
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert isinstance(names["values"], torch.Tensor)
    assert names["values"].shape == (16, 3, 1)
