"""The examples run as their first lines say, only for less time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "training"),
    [
        ("stable_baselines3_model.py", "--timesteps=1024"),
        ("rllib_module.py", "--iterations=1"),
    ],
)
def test_an_example_trains_and_measures(
    script: str, training: str, tmp_path: Path
) -> None:
    out = tmp_path / "measured"
    command = [sys.executable, str(EXAMPLES / script), training]
    done = subprocess.run(
        [*command, "--episodes=4", "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {
        (row["policy"], row["perturbation"]): row
        for row in json.loads((out / "results.json").read_text())["results"]
    }
    # Networks on one long vector: the order matters, and more tokens do not fit.
    assert rows["trained", "shuffle"]["drop"] != 0
    assert "takes 8 tokens and fails on 40" in rows["trained", "inject"]["gap"]
    assert rows["heuristic", "clean"]["mean"] > rows["random", "clean"]["mean"]
    assert "not measured: inject" in done.stdout
