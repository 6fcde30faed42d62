"""The benchmark at a tiny size: that it runs and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"
NAMES = {
    "env/simple_centroid",
    "attention/width_one",
    "sample/simple_centroid",
    "sample/simple_centroid/stock_batched",
    "sample/simple_centroid/stock_single",
    "iteration/simple_centroid",
    "time_to_return/simple_centroid",
    "time_to_skill/simple_centroid",
    "evaluate/simple_centroid",
}


def test_it_writes_the_table(tmp_path):
    file = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--json", str(file)],
        check=True,
        cwd=tmp_path,
        capture_output=True,
    )
    content = json.loads(file.read_text())
    assert content["machine"]["torch"]
    rows = content["rows"]
    assert {row["name"] for row in rows} == NAMES
    for row in rows:
        assert {"name", "value", "unit", "comparator", "ratio"} <= set(row)
        assert row["value"] is None or row["value"] > 0
    compared = [row for row in rows if row["name"].startswith("sample/")]
    assert all(row["ratio"] > 0 for row in compared)
    assert len(compared) == 3
