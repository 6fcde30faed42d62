"""The tables and the picture of a KNN-centroid study."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import knn_study
import pytest

Run = Callable[..., str]


def write(sweep: Path, number: int, pooling: dict[str, Any], **options: Any) -> None:
    """Write one trial's results by hand."""
    task = {"name": "knn_centroid", "num_vectors": 32, "dim": 16, "target": "nearest"}
    mean = options.pop("mean")
    folds = options.pop("folds", 3)
    has_constant = options.pop("has_constant", False)
    scale = options.pop("scale", "cpu")
    results = {
        "task": {**task, **options},
        "encoder": {"name": "transformer", "dim": 16, "num_layers": 12},
        "pooling": pooling,
        "scale": scale,
        "metric": "mse",
        "folds": [{}] * folds,
        "mean": {"mse": mean},
        "sd_over_folds": {"mse": 0.0012} if folds > 1 else None,
        "baselines": {"centroid": 0.08, "constant": 0.2}
        if has_constant
        else {"centroid": 0.08},
    }
    folder = sweep / "trials" / str(number)
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "results.json").write_text(json.dumps(results))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script in this process; return what it prints."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["knn_study.py", *map(str, arguments)])
        knn_study.main()
        return capsys.readouterr().out

    return call


def test_table_and_picture(run: Run, tmp_path: Path) -> None:
    write(tmp_path, 0, {"name": "ada", "query": None}, k=16, mean=0.0031)
    write(tmp_path, 1, {"name": "ada", "query": None}, k=1, mean=0.05)
    write(tmp_path, 2, {"name": "max"}, k=1, mean=0.06)
    picture = tmp_path / "figure.png"
    title, _, *rows = run(tmp_path, "--out", picture).splitlines()
    assert title.startswith("N = 32, d = 16, scale=cpu, mean ± sd over 3 folds")
    assert rows == [
        "|  | k = 1 | k = 16 |",
        "| --- | --- | --- |",
        "| MaxPool | 0.0600 ± 0.0012 / 0.022 |  |",
        "| AdaPool | 0.0500 ± 0.0012 / 0.018 | 0.0031 ± 0.0012 / 0.002 |",
        "| centroid | 0.0800 | 0.0800 |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_r2_is_relative_to_a_constant(run: Run, tmp_path: Path) -> None:
    write(tmp_path, 0, {"name": "max"}, k=1, mean=0.05, has_constant=True)
    title, _, _, _, *rows = run(tmp_path).splitlines()
    assert title.startswith("N = 32, d = 16, scale=cpu, mean ± sd over 3 folds (R²);")
    assert rows == [
        "| MaxPool | 0.0500 ± 0.0012 (0.75) / 0.022 |",
        "| centroid | 0.0800 |",
        "| constant | 0.2000 |",
    ]


@pytest.mark.parametrize(
    ("target", "num_vectors", "warns"),
    [("nearest", 32, True), ("nearest", 20, False), ("max", 128, False)],
)
def test_a_blind_class_token_is_noted(run, tmp_path, target, num_vectors, warns):
    size: dict[str, Any] = {"target": target, "num_vectors": num_vectors}
    write(tmp_path, 0, {"name": "cls"}, k=1, mean=0.07, **size)
    title = run(tmp_path).splitlines()[0]
    assert ("ClsToken's of a network that cannot see the target" in title) == warns


def test_aggregation_is_compared_at_the_papers_size_alone(run, tmp_path) -> None:
    for number, query in enumerate((None, [0])):
        pooling = {"name": "ada", "query": query}
        write(tmp_path, number, pooling, k=4, target="max", mean=0.1, num_vectors=128)
    printed = run(tmp_path)
    assert "| AdaPool | 0.1000 ± 0.0012 / 0.002 |" in printed
    assert "| AdaPool, query [0] | 0.1000 ± 0.0012 |" in printed
    size = {"target": "max", "num_vectors": 128}
    write(tmp_path, 3, {"name": "avg"}, k=4, mean=0.2, folds=1, **size)
    assert "| AvgPool | 0.2000 / 0.003 |" in run(tmp_path)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2, "expected one run for each cell, got several for MaxPool at 1"),
        (0, "expected finished runs of fit, got none"),
    ],
)
def test_what_is_no_study_is_refused(run, tmp_path, capsys, count, message) -> None:
    for number in range(count):
        write(tmp_path, number, {"name": "max"}, k=1, mean=0.06 + number)
    with pytest.raises(SystemExit, match="^2$"):
        run(tmp_path)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_vectors", 64),
        ("dim", 8),
        ("target", "max"),
        ("data_seed", 1),
        ("scale", "tiny"),
    ],
)
def test_runs_on_other_sets_are_refused(run, tmp_path, capsys, key, value) -> None:
    write(tmp_path, 0, {"name": "max"}, k=1, mean=0.06, data_seed=0)
    write(
        tmp_path,
        1,
        {"name": "max"},
        **{"k": 2, "mean": 0.05, "data_seed": 0, key: value},
    )
    with pytest.raises(SystemExit, match="^2$"):
        run(tmp_path)
    assert "expected runs on the same sets, got {'num_vec" in capsys.readouterr().err
