"""The campaign of random kills."""

import copy
import json
import os
import runpy
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from marl_pool.runs.run import Best, Run

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


@pytest.mark.parametrize(
    ("best", "file", "allowed"),
    [
        # A signal added the checkpoint of iteration 6; the others are of every run.
        (6, "policy/model.safetensors", True),
        (7, "policy/model.safetensors", False),
        (9, "policy/model.safetensors", False),
        (6, "iter_000007/policy/model.safetensors", False),
    ],
)
def test_only_the_policy_of_an_added_checkpoint_may_differ(
    tmp_path, monkeypatch, best, file, allowed
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    campaign = runpy.run_path(str(SCRIPT), run_name="campaign")
    assert campaign["EVERY"] == 7
    run = Run.create(tmp_path / "run", {"env": {"name": "cartpole"}})
    with run.save_policy_dir(Best(best, 0.5)):
        pass
    results = [{"rows": [{}] * 9, "weights": {"policy/model.safetensors": 1, file: 1}}]
    expected = copy.deepcopy(results)
    assert campaign["equal_but_added"](run.path, results, expected)
    expected[0]["weights"][file] = 2
    assert campaign["equal_but_added"](run.path, results, expected) == allowed


START = """Traceback (most recent call last):
  File "<frozen runpy>", line 189, in _run_module_as_main
  File "<frozen importlib._bootstrap>", line 241, in _call_with_frames_removed
KeyboardInterrupt
"""
OURS = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "marl_pool/__main__.py", line 12, in main
KeyboardInterrupt
"""


def test_a_traceback_of_pythons_start_is_not_ours():
    campaign = runpy.run_path(str(SCRIPT), run_name="campaign")
    has_traceback = campaign["has_traceback"]
    assert not has_traceback("")
    assert not has_traceback(START)
    assert has_traceback(OURS)
    assert has_traceback(START + OURS)
    assert has_traceback("Traceback of something else")
