"""The origin of a checkpoint, and the line where something else resumes it."""

import pytest

from marl_pool.cli import main as cli
from marl_pool.runs.run import Run
from marl_pool.training import loop

TINY = [
    *("env=helpers.wind_env:WindEnv", "policy=feed_forward", "policy.hidden=[3]"),
    *("evolution.population=6", "repetitions=2", "total_generations=1"),
    *("validation.episodes=2", "threads=1", "--run-dir", "run"),
]
RESUME = ["resume", "run", "--plugin", "helpers.wind_env:WindEnv"]


@pytest.fixture
def begun(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "describe_kernels", lambda device: "native (v4)")
    assert cli.main(["evolve", *TINY]) == 0
    capsys.readouterr()
    return Run.open("run")


def test_the_same_machine_and_versions_are_not_mentioned(begun, capsys):
    (saved,) = begun.checkpoints()
    assert begun.origin(saved).keys() == {"kernels", "marl_pool", "torch"}
    assert cli.main([*RESUME, "total_generations=2"]) == 0
    assert "is now" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("describe_kernels", lambda _: "torch", "native (v4) is now torch, threads=1"),
        ("__version__", "9.9.9", " is now 9.9.9"),
        ("torch.__version__", "1.0", " is now 1.0"),
    ],
)
def test_what_changes_the_numbers_is_told_once(
    begun, capsys, monkeypatch, name, value, message
):
    monkeypatch.setattr(f"{loop.__name__}.{name}", value)
    for number in (2, 3):
        assert cli.main([*RESUME, f"total_generations={number}"]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert sum(message in line for line in lines) == (number == 2)


def test_a_checkpoint_without_a_record_is_resumed_as_before(begun, capsys, monkeypatch):
    monkeypatch.setattr(Run, "origin", lambda *_: {})
    assert cli.main([*RESUME, "total_generations=2"]) == 0
    assert "is now" not in capsys.readouterr().err
