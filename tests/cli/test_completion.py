"""Completions that a shell offers when Tab is pressed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("argcomplete")


def offered(line, folder):
    """Complete a command line as a shell asks for it."""
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "out"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    # argcomplete ends the process, and leaves its files to that.
    subprocess.run(
        [sys.executable, "-m", "marl_pool"],
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
    )
    return [word.strip() for word in (folder / "out").read_text().split("\n")]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("eval", {"evaluate"}),
        ("train total", {"total_steps="}),
        ("train pooling=m", {"pooling=max", "pooling=multi"}),
    ],
)
def test_verbs_keys_and_options_are_offered(typed, words, tmp_path):
    assert set(offered(f"marl-pool {typed}", tmp_path)) >= words


def test_keys_of_other_verbs_are_not_offered(tmp_path):
    keys = offered("marl-pool evaluate ", tmp_path)
    assert "episodes=" in keys
    assert "total_steps=" not in keys
