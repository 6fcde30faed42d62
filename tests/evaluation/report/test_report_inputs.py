"""Inputs of a report: evaluations that count, methods, broken folders."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.reported import (
    EPISODES,
    SMALL,
    evaluated,
    gaps,
    trained,
    with_policy,
    written,
)
from helpers.tables import yaml_cases
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.evaluation.report.evaluated import read_runs, usual_settings
from marl_pool.evaluation.report.methods import methods_of
from marl_pool.evaluation.results import DOCUMENT, RETURNS
from marl_pool.files.manifest import sealed_json
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError

# Which evaluation is read


def test_the_newest_complete_evaluation_counts(tmp_path: Path) -> None:
    run = evaluated(evaluated(trained(tmp_path / "a")), shift=0.1)
    # A third one that was cut off, a fourth without returns, and one of ten.
    (run.evaluation_dir / "results-3.json").write_text('{"results": [')
    shutil.copy(run.evaluation_dir / DOCUMENT, run.evaluation_dir / "results-10.json")
    (source,) = read_runs([run])
    assert source.evaluation is not None
    assert source.evaluation.path.name == "results-2.json"
    assert np.stack(source.evaluation.rows["returns"]).shape == (9, EPISODES)


def test_evaluations_of_one_policy_are_read_as_one(tmp_path: Path) -> None:
    run = evaluated(trained(tmp_path / "a"), severities=[0.5])
    evaluated(run, severities=[1.0])
    (source,) = read_runs([run])
    evaluation = source.evaluation
    assert evaluation is not None
    severities = [
        row["severity"]
        for row in evaluation.rows.to_dict("records")
        if row["perturbation"] == "occlude"
    ]
    assert severities == [1.0, 0.5]
    assert evaluation.path.name == "results-2.json"
    names = [path.name for path in evaluation.rows["path"].unique()]
    assert names == ["results-2.json", "results.json"]
    assert len(evaluation.rows) == 9


@pytest.mark.parametrize(
    "changes", [{"checkpoint": "last"}, {"iteration": 4}, {"seed": 1}, {"episodes": 8}]
)
def test_evaluations_of_another_kind_are_not_read_as_one(tmp_path, changes):
    run = evaluated(trained(tmp_path / "a"), severities=[0.5])
    evaluated(run, severities=[1], **changes)
    (source,) = read_runs([run])
    assert source.evaluation is not None
    assert source.evaluation.rows["path"].nunique() == 1
    assert len(source.evaluation.rows) == 8


def test_the_settings_of_the_evaluated_runs_are_known(tmp_path: Path) -> None:
    options = {"checkpoint": "last", "changed": {"num_noise": 9}}
    first = evaluated(trained(tmp_path / "a"), severities=[0.5, 1], **options)
    sources = read_runs([first, trained(tmp_path / "b", seed=1)])
    settings = usual_settings(sources)
    assert settings == {
        **{"episodes": EPISODES, "seed": 0, "checkpoint": "last"},
        **{"env": {"num_noise": 9}, "stochastic": False, "worst_of": 1},
        "perturbations": [
            {"name": "occlude", "severities": [0.5, 1]},
            {"name": "jitter", "severities": [0.2], "features": None},
        ],
        "transfer": [{"label": "more noise", "env": {"num_noise": 9}}],
    }
    assert usual_settings(sources[1:]) == {}


def test_runs_of_the_same_name_are_named_with_the_folders_above(tmp_path):
    runs = [trained(tmp_path / sweep / "a", seed=n) for n, sweep in enumerate("xy")]
    assert [source.name for source in read_runs(runs)] == ["x/a", "y/a"]
    assert read_runs(runs[:1])[0].name == "a"


@yaml_cases("changes, message")
def test_an_evaluation_of_another_protocol_is_left_out(tmp_path, changes, message):
    different = evaluated(trained(tmp_path / "odd"), **changes)
    reference_runs = [evaluated(trained(tmp_path / f"{s}", seed=s)) for s in (1, 2)]
    source, *peers = read_runs([different, *reference_runs])
    assert message in source.evaluation_missing
    assert source.evaluation is None
    assert all(peer.evaluation for peer in peers)


@yaml_cases("key, message")
def test_runs_of_different_tasks_are_refused(tmp_path, key, message, refused):
    base = [] if "env=" in key else SMALL
    trained(tmp_path / "a")
    Run.create(tmp_path / "b", compose("train", [*base, key]))
    line = refused("report", str(tmp_path / "a"), str(tmp_path / "b"))
    assert line.startswith(f"marl-pool: runs that cannot be compared: {message}")


@yaml_cases("changes, message")
def test_different_pettingzoo_environments_are_not_pooled(tmp_path, changes, message):
    env = {"name": "pettingzoo", "module": "mpe2.simple_spread_v3", "options": {"N": 3}}
    runs = [
        Run.create(tmp_path / name, {"env": config, "seed": 0})
        for name, config in {"a": env, "b": env | changes}.items()
    ]
    with pytest.raises(InputError, match=f"cannot be compared: {message} in"):
        read_runs(runs)


def test_an_evaluation_before_more_training_is_marked(tmp_path, capsys):
    run = evaluated(with_policy(trained(tmp_path / "a")), iteration=3)
    (run.policy_dir / "best.json").write_text('{"iteration": 5, "score": -1.0}')
    out = tmp_path / "page.html"
    message = "of iteration 3, but the best is now 5"
    assert cli.main(["report", str(run.path), "--out", str(out), "videos=false"]) == 0
    assert f"its evaluation is {message}" in capsys.readouterr().err
    assert message in out.read_text()


def test_one_run_twice_and_one_seed_twice_are_refused(tmp_path: Path) -> None:
    first, copy = trained(tmp_path / "a"), trained(tmp_path / "b")
    with pytest.raises(InputError, match="got one of them twice"):
        read_runs([first, Run.open(tmp_path / "a")])
    with pytest.raises(InputError, match="seed=0 included: expected one run"):
        methods_of(read_runs([first, copy]))


# Broken files


def document(text: str | bytes) -> Callable[[Run], Any]:
    """Replace the document."""
    content = text.encode() if isinstance(text, str) else text
    return lambda run: (run.evaluation_dir / DOCUMENT).write_bytes(content)


def changed(
    *dropped: str, sealed: bool = False, **content: Any
) -> Callable[[Run], Any]:
    """Change keys of the document and, if ``sealed``, update its checksum."""

    def change(run: Run) -> None:
        path = run.evaluation_dir / DOCUMENT
        values = json.loads(path.read_text()) | content
        remaining = {key: value for key, value in values.items() if key not in dropped}
        path.write_text(json.dumps(sealed_json(remaining) if sealed else remaining))

    return change


def returns(content: bytes) -> Callable[[Run], Any]:
    """Replace the returns."""
    return lambda run: (run.evaluation_dir / RETURNS).write_bytes(content)


def packed(save: Callable[..., None], *arrays: Any, **members: Any) -> bytes:
    with io.BytesIO() as file:
        save(file, *arrays, **members)
        return file.getvalue()


def npz(array: np.ndarray) -> Callable[[Run], Any]:
    return returns(packed(np.savez, returns=array))


CHANGED = "its checksum differs: it has changed since it was written"
UNUSABLE = "it cannot be used: "
SHAPE = f"{UNUSABLE}InputError, expected returns of 9 rows"
DAMAGED = f"{UNUSABLE}ValueError, returns.npz is damaged"
NO_FILE = "FileNotFoundError, [Errno 2] No such file or directory: 'returns.npz'"
NOT_NPZ = f"{UNUSABLE}InputError, returns.npz: expected an .npz file"
NOT_FINITE = f"{UNUSABLE}InputError, a return is not a finite number"
BREAKS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "cut": (document('{"results": ['), f"{UNUSABLE}JSONDecodeError"),
    "list": (document("[1, 2]"), CHANGED),
    "number": (document("3"), f"{UNUSABLE}TypeError"),
    "bytes": (document(b"\xff\xfe{"), f"{UNUSABLE}UnicodeDecodeError"),
    "unsealed": (changed("sha256"), CHANGED),
    "episodes": (changed(episodes="16"), CHANGED),
    # From another version, with the right checksum.
    "other about": (changed("seed", sealed=True), f"{UNUSABLE}KeyError, 'seed'"),
    "no rows": (changed(sealed=True, results=[]), f"{UNUSABLE}KeyError"),
    "rows": (changed(sealed=True, results=[1] * 9), f"{UNUSABLE}KeyError"),
    "no zip": (returns(b"PK no zip"), DAMAGED),
    "array": (returns(packed(np.save, np.zeros(3))), NOT_NPZ),
    "none": (
        lambda run: (run.evaluation_dir / RETURNS).unlink(),
        f"{UNUSABLE}{NO_FILE}",
    ),
    "columns": (npz(np.zeros((9, 5))), SHAPE),
    "words": (npz(np.full((9, 16), "x")), SHAPE),
    "nan": (npz(np.full((9, 16), np.nan)), NOT_FINITE),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_evaluation_is_left_out_with_the_reason(tmp_path, kind):
    spoil, reason = BREAKS[kind]
    intact = evaluated(trained(tmp_path / "a"))
    broken = evaluated(trained(tmp_path / "b", seed=1))
    assert read_runs([broken])[0].evaluation is not None
    spoil(broken)
    first, second = read_runs([intact, broken])
    assert first.evaluation is not None
    assert second.evaluation is None
    assert f"(results.json: {reason}" in second.evaluation_missing


@pytest.mark.parametrize("lines", ["2,128,x\n", "2,128,-1,7\n"], ids=str.strip)
def test_metrics_that_are_no_numbers_are_missing(tmp_path: Path, lines: str) -> None:
    run = evaluated(trained(tmp_path / "a"))
    with run.metrics_path.open("a") as file:
        file.write(lines)
    html = written([run], tmp_path)
    assert "a: metrics.csv holds a cell that is not a number" in html
    assert gaps(html, "overview") == ["metrics.csv holds a cell that is not a number"]


@pytest.mark.parametrize("config", ["env: 3\n", "env: {}\n", "seed: 0\n"])
def test_a_configuration_without_an_env_is_refused(tmp_path, refused, config):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(f"{config}package_version: '1'\n")
    message = "config.yaml: expected env.name, the name of an environment, got env: "
    assert message in refused("report", str(tmp_path / "a"))


# Methods


def test_runs_that_differ_in_their_seed_alone_are_one_method(tmp_path: Path) -> None:
    keys = [("pooling=ada",), ("pooling=max",), ("pooling=ada", "threads=1")]
    runs = [
        trained(tmp_path / f"{place}", *overrides, seed=place)
        for place, overrides in enumerate(keys)
    ]
    ada, maximum = methods_of(read_runs(runs))
    assert [ada.name, maximum.name] == ["ada", "max"]
    assert [source.seed for source in ada.runs] == [0, 2]


def test_a_method_is_named_after_its_differences(tmp_path: Path) -> None:
    keys = [
        ("pooling=ada", "ppo.lr=0.1", "env.num_noise=3"),
        ("pooling=ada", "ppo.lr=0.2", "env.num_noise=3"),
        ("pooling=ada", "ppo.lr=0.1", "env.num_noise=5"),
        ("pooling=ada", "pooling.query=mean", "ppo.lr=0.1", "env.num_noise=3"),
        ("pooling=max", "ppo.lr=0.1", "env.num_noise=3"),
    ]
    runs = [
        trained(tmp_path / str(place), *overrides)
        for place, overrides in enumerate(keys)
    ]
    names = [method.name for method in methods_of(read_runs(runs))]
    assert names == [
        *("ada query=None lr=0.1 · num_noise=3", "ada query=None lr=0.2 · num_noise=3"),
        *("ada query=mean lr=0.1 · num_noise=3", "max lr=0.1 · num_noise=3"),
        "ada query=None lr=0.1 · num_noise=5",
    ]
    assert methods_of(read_runs(runs[:1]))[0].name == "ada"


def test_a_section_that_only_some_have_distinguishes_methods(tmp_path: Path) -> None:
    runs = [trained(tmp_path / str(place), seed=place) for place in range(3)]
    runs[0].write_config({**runs[0].config, "fixed": {"agent": "flee"}})
    runs[1].write_config({**runs[1].config, "fixed": None})
    runs[2].write_config({**runs[2].config, "fixed": {"agent": "chase"}})
    names = [method.name for method in methods_of(read_runs(runs))]
    assert len(set(names)) == 3
    assert "flee" in names[0]
    assert "chase" in names[2]
