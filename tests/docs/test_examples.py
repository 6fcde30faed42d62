"""Each program of ``examples/`` runs as its first lines say, only for less time."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
SMALL = (
    "ppo.num_envs=2",
    "ppo.batch_size=16",
    "ppo.minibatch_size=8",
    "total_steps=16",
)


def run(script: str, *arguments: str, cwd: Path, **variables: str) -> str:
    """Run an example in an empty folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_short_and_says_how_to_run_it() -> None:
    for file in EXAMPLES.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert f"python examples/{file.name}" in text.split('"""')[1]
        limit = 350 if file.name == "ppo_sets.py" else 70
        assert len(text.splitlines()) <= limit, file.name


@pytest.mark.parametrize("script", ["train.py", "custom_env.py", "custom_pooling.py"])
def test_help_is_no_override(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert "overrides" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluate_measures_the_shipped_policy(tmp_path: Path) -> None:
    rows = [
        line.split()
        for line in run("evaluate.py", "--episodes=2", cwd=tmp_path).splitlines()
    ]
    policies = {row[0] for row in rows}
    assert {"trained", "random"} <= policies
    (clean,) = (float(row[3]) for row in rows if row[:2] == ["trained", "clean"])
    (random,) = (float(row[3]) for row in rows if row[:2] == ["random", "clean"])
    assert clean > random


@pytest.mark.slow
def test_train_leaves_a_run_and_its_evaluation(tmp_path: Path) -> None:
    run("train.py", *SMALL, "env.max_steps=4", cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    content = json.loads((folder / "quick" / "results.json").read_text())
    labels = {row["perturbation"] for row in content["results"]}
    assert {"clean", "shuffle"} <= labels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "section", "name"),
    [
        ("custom_pooling.py", "pooling", "custom_pooling:GatedSum"),
        ("custom_env.py", "env", "custom_env:Reach"),
    ],
)
def test_a_custom_class_is_trained(script, section, name, tmp_path):
    printed = run(script, *SMALL, "env.max_steps=4", cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"{folder.relative_to(tmp_path)}: last return " in printed
    assert f"{section}:\n  name: {name}" in (folder / "config.yaml").read_text()
    assert (folder / "policy" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_model_from_elsewhere_is_measured(tmp_path: Path) -> None:
    words = ("--timesteps=1024", "--extractor=flat", "--episodes=4", "--out=measured")
    printed = run("stable_baselines.py", *words, cwd=tmp_path)
    content = json.loads((tmp_path / "measured" / "results.json").read_text())
    rows = {(row["policy"], row["perturbation"]): row for row in content["results"]}
    # Networks on one long vector: the order matters, and more tokens do not fit.
    assert rows["trained", "shuffle"]["drop"] != 0
    assert "takes 8 tokens and fails on 40" in rows["trained", "inject"]["missing"]
    assert rows["heuristic", "clean"]["mean"] > rows["random", "clean"]["mean"]
    assert "not measured: inject" in printed


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--tokens",)])
def test_a_model_is_measured_in_highway_envs_own_space(form, tmp_path):
    pytest.importorskip("highway_env")
    words = ("--timesteps=64", "--episodes=1", *form)
    printed = run("highway.py", *words, cwd=tmp_path).replace("│", " ")
    rows = [row.split() for row in printed.splitlines()]
    measured = {row[1] for row in rows if row[:1] == ["trained"]}
    assert {"clean", "shuffle", "occlude", "jitter"} <= measured


SETS = {
    "stable_baselines.py": (("--timesteps=1024",), "with 1-3-28 instead of 1-3-4"),
    "rllib.py": (("--iterations=1",), "2048 steps: return"),
    # Two batches of two episodes; the heads need one token more, or none.
    **{
        f"ppo_sets.py --pooling={pooling}": (
            ("--num-envs=2", "--num-steps=128", "--total-steps=512"),
            "512 steps",
        )
        for pooling in ("ada", "cls")
    },
}
"""By command, words that shorten it, and a part of what it prints."""


@pytest.mark.slow
@pytest.mark.parametrize("command", SETS)
def test_a_model_is_trained_on_sets(command: str, tmp_path: Path) -> None:
    sizes, expected = SETS[command]
    words = (*command.split(), *sizes, "--episodes=4", "--out=measured")
    # RLlib itself writes to ~/ray_results; the package does not, as a test asserts.
    printed = run(*words, cwd=tmp_path, HOME=str(tmp_path))
    assert expected in printed
    content = json.loads((tmp_path / "measured" / "results.json").read_text())
    rows = {(row["policy"], row["perturbation"]): row for row in content["results"]}
    # Neither the order nor the number of tokens is fixed, whatever was learned.
    assert abs(rows["trained", "shuffle"]["drop"]) < 1e-4
    assert rows["trained", "inject"]["mean"] is not None


@pytest.mark.slow
def test_torchrl_trains_on_sets(tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    words = ("--iterations=1", "--frames=32", "--episodes=2")
    printed = run("torchrl_ppo.py", *words, cwd=tmp_path)
    assert "shuffle" in printed
