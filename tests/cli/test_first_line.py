"""The line that a terminal shows before anything slow is loaded."""

import sys

import pytest

from marl_pool.cli import main as cli


@pytest.mark.parametrize("verb", ["train", "resume"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_a_line_at_once(monkeypatch, capsys, verb, is_terminal):
    messages = []

    def run(*arguments: object) -> int:
        messages.append(capsys.readouterr().err)
        return 0

    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setitem(cli.VERBS, verb, run)
    assert cli.main([verb]) == 0
    assert messages == [f"marl-pool {verb}: starting\n" if is_terminal else ""]
