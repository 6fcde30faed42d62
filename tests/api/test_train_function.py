"""`marl_pool.train`: the command line's training, from Python."""

import json
import random
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import marl_pool
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.policies.storage import load_policy
from marl_pool.pooling.ada import AdaPooling
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import seed_process

TINY = ("ppo.num_envs=2", "ppo.batch_size=16", "ppo.minibatch_size=8", "total_steps=16")


def replace_training(monkeypatch, train) -> None:
    stand_in = types.ModuleType("marl_pool.training.ppo")
    stand_in.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)


@pytest.fixture
def trained(monkeypatch, tmp_path) -> list[dict[str, Any]]:
    """Configurations passed to training, which is replaced and does nothing."""
    monkeypatch.chdir(tmp_path)
    configs: list[dict[str, Any]] = []
    replace_training(monkeypatch, lambda run, config: configs.append(config.plain))
    return configs


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        ({"pooling": "max", "total_steps": 4096}, "pooling=max total_steps=4096"),
        ({"ppo.lr": 1e-3}, "ppo.lr=1e-3"),
        (
            {"ppo": {"lr": np.float32(0.5), "num_envs": np.int64(8)}},
            "ppo.lr=0.5 ppo.num_envs=8",
        ),
        (
            {"pooling": {"query": "mean", "name": "ada"}},
            "pooling=ada pooling.query=mean",
        ),
        (
            {"env": {"name": "simple_tag", "prey": "learned"}, "fixed": {"prey": "a"}},
            "env=simple_tag env.prey=learned fixed={prey:a}",
        ),
        (
            {"pooling": {"name": "multi", "heads": [{"name": "avg"}, {"name": "max"}]}},
            "pooling=multi pooling.heads=[{name:avg},{name:max}]",
        ),
        (
            {"time_limit": None, "experiment": "simple_centroid"},
            "experiment=simple_centroid",
        ),
    ],
)
def test_options_mean_what_overrides_mean(trained, options, overrides):
    run = marl_pool.train(run_dir="run", **options)
    assert trained == [compose("train", overrides.split())]
    assert run.config == Run.open("run").config == trained[0]


def test_a_tilde_is_the_home_folder(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert marl_pool.train(run_dir="~/run").path == tmp_path / "home" / "run"
    assert not Path("~").exists()


def test_options_come_after_overrides(trained):
    marl_pool.train("pooling=max", "seed=1", run_dir=Path("run"), seed=2)
    assert trained[0]["pooling"]["name"] == "max"
    assert trained[0]["seed"] == 2


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ((), {"poling": "max"}, ["poling"]),
        ((), {"ppo": {"lr": torch.ones(2)}}, ["ppo.lr", "numbers", "Tensor"]),
        ((), {"pooling": AdaPooling}, ["'marl_pool.pooling.ada:AdaPooling' names it"]),
        ((), {"ppo.lr=1 seed": 2}, ["ppo.lr=1 seed"]),
        ((), {"fixed": {"a b": "heuristic"}}, ["fixed", "'a b'"]),
        ((), {"pooling": {"name": "multi", "heads": [{1: "avg"}]}}, ["heads", "1"]),
        (("--run-dir",), {}, ["--run-dir"]),
        (("grid={seed: [1]}",), {}, ["grid", "marl-pool sweep"]),
        ((3,), {}, ["overrides", "text", "3"]),
        ((), {"run_dir": 5}, ["run_dir", "text, Path or null", "5"]),
        ((), {"config_dir": ["mine"]}, ["config_dir", "Path", "['mine']"]),
    ],
)
def test_it_refuses_what_the_command_refuses(trained, overrides, options, words):
    with pytest.raises(InputError) as refused:
        marl_pool.train(*overrides, **{"run_dir": "run", **options})
    assert all(word in str(refused.value) for word in words)
    assert trained == []
    assert not Path("run").exists()


@pytest.mark.parametrize("names", [[], ["other"]])
def test_a_refused_run_leaves_no_folder_of_its_own(monkeypatch, tmp_path, names):
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path("runs", name).mkdir(parents=True)

    def refuse(*_):
        raise InputError("init: no such policy")

    replace_training(monkeypatch, refuse)
    with pytest.raises(InputError, match="no such policy"):
        marl_pool.train(total_steps=16)
    assert [path.name for path in Path().glob("runs/*")] == names
    assert Path("runs").exists() == bool(names)


@pytest.mark.slow
def test_it_trains_as_the_command_does(tmp_path):
    """Weights and logged returns, bit for bit, whatever was sampled before."""
    command, function = tmp_path / "command", tmp_path / "function"
    assert cli.main(["train", "pooling=max", *TINY, "--run-dir", str(command)]) == 0
    torch.rand(3)
    threads = torch.get_num_threads()
    run = marl_pool.train(*TINY, pooling="max", run_dir=function)
    assert torch.get_num_threads() == threads
    first, second = (
        load_policy(path / "policy").state_dict() for path in (command, function)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = [Run.open(path).rows()[-1] for path in (command, run.path)]
    timed = {name for name in rows[0] if "seconds" in name or "per_second" in name}
    command_row, function_row = (
        {k: v for k, v in row.items() if k not in timed} for row in rows
    )
    assert json.dumps(command_row) == json.dumps(function_row)


@pytest.mark.parametrize("fails", [False, True])
def test_it_leaves_the_callers_generators_and_modes_alone(monkeypatch, tmp_path, fails):
    def train(run, config):
        seed_process(1)
        if fails:
            raise InputError("init: no such policy")

    replace_training(monkeypatch, train)

    def numbers():
        return torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

    seed_process(5)
    expected = numbers()
    seed_process(5)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    with suppress(InputError):
        marl_pool.train(run_dir=tmp_path / "run")
    assert numbers() == expected
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_a_callback_gets_each_row_once_and_may_stop(monkeypatch, tmp_path):
    def train(run, config, should_stop):
        for iteration in range(1, 9):
            if should_stop():
                break
            run.log({"iteration": iteration, "env_steps": 16 * iteration})
        assert not should_stop()

    replace_training(monkeypatch, train)
    calls = []

    def on_iteration(run, row):
        calls.append((run.path, row["env_steps"]))
        return row["iteration"] == 3

    run = marl_pool.train(run_dir=tmp_path / "run", on_iteration=on_iteration)
    assert calls == [(run.path, 16), (run.path, 32), (run.path, 48)]
    pytest.importorskip("pandas")
    assert run.to_pandas()["env_steps"].tolist() == [16, 32, 48]


def test_a_callback_gets_the_row_at_which_the_time_is_over(tmp_path):
    rows = []
    marl_pool.train(
        *TINY[:3],
        total_steps=100_000,
        time_limit=0.001,
        run_dir=tmp_path / "run",
        on_iteration=lambda run, row: rows.append(row["iteration"]),
    )
    assert rows == [row["iteration"] for row in Run.open(tmp_path / "run").rows()]
    assert rows


def test_a_callback_must_be_callable(trained):
    with pytest.raises(InputError, match="on_iteration: expected .*, got 3"):
        marl_pool.train(on_iteration=3)
    assert not trained
