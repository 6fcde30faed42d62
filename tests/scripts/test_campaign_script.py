"""The campaign of random kills."""

import json
import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT

SCRIPT = ROOT / "scripts" / "campaign.py"


@pytest.mark.slow
def test_a_killed_fit_equals_an_undisturbed_one(tmp_path):
    rows = tmp_path / "rows.json"
    words = ["--count", "1", "--seed", "1", "--only", "SIGKILL", "--only", "fit"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "--json", rows],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert "| SIGKILL of the driver | fit | 1 |" in done.stdout
    (row,) = json.loads(rows.read_text())
    assert row["good"]
    assert row["equal"]
    assert row["kills"] > 0
    assert not [*tmp_path.glob("campaign-*")]
