"""The tables and the picture of a KNN-centroid study."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from helpers.paths import ROOT

Run = Callable[..., CompletedProcess[str]]
SCRIPT = ROOT / "scripts" / "knn_study.py"


def write(sweep: Path, number: int, pooling: dict[str, Any], **options: Any) -> None:
    """One trial's results, by hand."""
    task = {"name": "knn_centroid", "num_vectors": 32, "dim": 16, "target": "nearest"}
    mean = options.pop("mean")
    folds = options.pop("folds", 3)
    results = {
        "task": {**task, **options},
        "encoder": {"name": "transformer", "dim": 16, "num_layers": 12},
        "pooling": pooling,
        "scale": "cpu",
        "metric": "mse",
        "folds": [{}] * folds,
        "mean": {"mse": mean},
        "sd_over_folds": {"mse": 0.0012} if folds > 1 else None,
        "baselines": {"centroid": 0.08},
    }
    folder = sweep / "trials" / str(number)
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "results.json").write_text(json.dumps(results))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script in this process: a fresh one imports torch and matplotlib."""

    def call(*arguments: object) -> CompletedProcess[str]:
        command = [str(SCRIPT), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        status: Any = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        return CompletedProcess(command, status, *capsys.readouterr())

    return call


def test_table_and_picture(run: Run, tmp_path: Path) -> None:
    write(tmp_path, 0, {"name": "ada", "query": None}, k=16, mean=0.0031)
    write(tmp_path, 1, {"name": "ada", "query": None}, k=1, mean=0.05)
    write(tmp_path, 2, {"name": "max"}, k=1, mean=0.06)
    picture = tmp_path / "figure.png"
    done = run(tmp_path, "--out", picture)
    assert done.returncode == 0, done.stderr
    title, _, *rows = done.stdout.splitlines()
    assert title.startswith("N = 32, d = 16, scale=cpu, mean ± sd over 3 folds")
    assert rows == [
        "|  | k = 1 | k = 16 |",
        "| --- | --- | --- |",
        "| MaxPool | 0.0600 ± 0.0012 / 0.022 |  |",
        "| AdaPool | 0.0500 ± 0.0012 / 0.018 | 0.0031 ± 0.0012 / 0.002 |",
        "| centroid | 0.0800 | 0.0800 |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("target", "num_vectors", "warns"),
    [("nearest", 32, True), ("nearest", 20, False), ("max", 128, False)],
)
def test_it_says_that_the_published_class_token_is_blind(
    run: Run, tmp_path: Path, target: str, num_vectors: int, warns: bool
) -> None:
    size: dict[str, Any] = {"target": target, "num_vectors": num_vectors}
    write(tmp_path, 0, {"name": "cls"}, k=1, mean=0.07, **size)
    title = run(tmp_path).stdout.splitlines()[0]
    assert ("ClsToken's of a network that cannot see the target" in title) == warns


def test_aggregation_is_compared_at_the_papers_size_alone(
    run: Run, tmp_path: Path
) -> None:
    for number, query in enumerate((None, [0])):
        pooling = {"name": "ada", "query": query}
        write(tmp_path, number, pooling, k=4, target="max", mean=0.1, num_vectors=128)
    done = run(tmp_path)
    assert "| AdaPool | 0.1000 ± 0.0012 / 0.002 |" in done.stdout
    assert "| AdaPool, query [0] | 0.1000 ± 0.0012 |" in done.stdout
    write(tmp_path, 3, {"name": "avg"}, k=4, target="max", mean=0.2, folds=1)
    assert "| AvgPool | 0.2000 |" in run(tmp_path).stdout


def test_two_runs_for_one_cell_are_refused(run: Run, tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path, number, {"name": "max"}, k=1, mean=0.06 + number)
    done = run(tmp_path)
    assert done.returncode == 2
    assert "expected one run for each cell, got several for MaxPool at 1" in done.stderr


def test_what_holds_no_study(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}: expected finished runs of fit, got none" in done.stderr


@pytest.mark.parametrize(
    ("name", "trials"),
    [("figure4", 16), ("figure4_paper", 32), ("table2", 15), ("table8", 20)],
)
def test_presets_compose(name: str, trials: int) -> None:
    from marl_pool.config import plan_sweep

    plan = plan_sweep([f"experiment=adapool/{name}"], verb="fit")
    for trial in plan.trials:
        task = trial.config["task"]
        assert task["name"] == "knn_centroid"
        assert task["k"] <= task["num_vectors"]
    assert len(plan.trials) == trials
