"""Completions that a shell offers when Tab is pressed."""

import os

import pytest

from helpers.training import run_python

pytest.importorskip("argcomplete")


def completions(line, folder):
    """Return the completions of a command line, as a shell asks for them."""
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "out"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    # argcomplete ends the process without closing its files.
    result = run_python("-m", "marl_pool", env={**os.environ, **variables})
    assert result.returncode == 0, result.stderr
    return [word.strip() for word in (folder / "out").read_text().split("\n")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eval", {"evaluate"}),
        ("train pooling=m", {"pooling=max", "pooling=multi"}),
        ("evaluate ", {"episodes="}),
    ],
)
def test_verbs_options_and_the_keys_of_a_verb_are_offered(line, words, tmp_path):
    offers = set(completions(f"marl-pool {line}", tmp_path))
    assert offers >= words
    assert "total_steps=" not in offers
