"""The study of dropout: AdaPool's lead over another head, by permutation."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from dropout_study import (
    ENTROPY,
    METRICS,
    collect,
    final_values,
    lead,
    leads_text,
    markdown,
)
from scipy.stats import permutation_test

from marl_pool.utils.errors import InputError


def finals(levels: dict[str, dict[str, list[float]]]) -> pd.Series:
    rows = {
        (level, head, seed): value
        for level, heads in levels.items()
        for head, values in heads.items()
        for seed, value in enumerate(values)
    }
    names = ["counts", "pooling", "seed"]
    return pd.Series(rows.values(), pd.MultiIndex.from_tuples(rows, names=names))


CENTROID = {"name": "simple_centroid", "counts": "1-3-28"}


def write_run(
    folder: Path,
    ppo: dict[str, Any],
    init_std: float,
    value: float,
    env: dict[str, Any] = CENTROID,
) -> None:
    """Write what `collect` reads: twenty iterations that return ``value``."""
    config = {
        "env": dict(env),
        "encoder": {},
        "pooling": {"name": "max"},
        "policy": {"init_std": init_std},
        "ppo": {"dropout": 0.1, "lr_schedule": "constant", **ppo},
        "seed": 0,
        "total_steps": 2000,
    }
    folder.mkdir(parents=True)
    folder.joinpath("config.yaml").write_text(yaml.safe_dump(config), "utf-8")
    metrics = pd.DataFrame({"iteration": range(1, 21)})
    metrics["env_steps"] = 100 * metrics["iteration"]
    metrics[METRICS] = value
    metrics.to_csv(folder / "metrics.csv", index=False)


def test_runs_are_named_by_what_they_change_in_the_recipe(tmp_path):
    write_run(tmp_path / "a", {}, 0.2, -2.0)
    write_run(tmp_path / "b", {"gamma": 0.9, "lr_schedule": "linear"}, 0.05, -0.5)
    values = final_values(collect(tmp_path))
    assert values.droplevel(["counts", "pooling", "seed"]).to_dict() == {
        "0.1": -2.0,
        "0.1, falling rate, init_std 0.05, gamma 0.9": -0.5,
    }


def test_a_run_is_compared_with_the_recipe_of_its_environment(tmp_path):
    recipe = {"batch_size": 14_400, "gamma": 0.99}
    write_run(tmp_path / "a", recipe, 0.02, 1.5, {"name": "boxworld"})
    names = [("boxworld", "0.1", "max", 0)]
    assert list(final_values(collect(tmp_path)).index) == names


def test_two_runs_of_one_kind_are_not_averaged(tmp_path):
    write_run(tmp_path / "a", {}, 0.2, -2.0)
    write_run(tmp_path / "b", {}, 0.2, -0.5)
    with pytest.raises(InputError, match=r"got several of 1-3-28, 0\.1, max, 0"):
        collect(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a/metrics.csv", "", "metrics.csv: no table: No columns to parse"),
        ("a/metrics.csv", "iteration\n1\n", "metrics.csv: expected rows with the col"),
        ("a/config.yaml", None, "config.yaml: no such file"),
        ("a/config.yaml", "total_steps: 9000", "expected finished runs, got none"),
    ],
)
def test_a_run_that_cannot_be_read_is_named(tmp_path, name, text, message):
    write_run(tmp_path / "a", {}, 0.2, -0.5)
    file = tmp_path / name
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(InputError, match=message):
        collect(tmp_path)


def test_at_one_level_it_is_the_permutation_test_of_scipy():
    rng = np.random.default_rng(3)
    ada, head = rng.normal(0.5, 1, 5), rng.normal(0, 1, 4)
    difference, p_value = lead(finals({"1-3-28": {"ada": [*ada], "max": [*head]}}))
    expected = permutation_test(
        (ada, head), lambda a, b: a.mean() - b.mean(), n_resamples=np.inf
    )
    assert difference == pytest.approx(expected.statistic)
    # SciPy doubles the smaller tail.
    larger = permutation_test(
        (ada, head),
        lambda a, b: abs(a.mean() - b.mean()),
        n_resamples=np.inf,
        alternative="greater",
    )
    assert p_value == pytest.approx(larger.pvalue)


def test_levels_are_exchanged_each_by_itself():
    levels = {
        "1-3-28": {"ada": [1.0, 2.0], "avg": [0.0, -1.0]},
        "1-31-0": {"ada": [5.0, 5.5], "avg": [4.0, 4.5]},
    }
    # Six ways at each level; none has a larger lead than 2 and 1, only the reverse.
    assert lead(finals(levels)) == (pytest.approx(1.5), pytest.approx(2 / 36))


def test_a_head_without_runs_of_ada_is_compared_with_none():
    rows = [
        ("1-3-28", dropout, head, seed, 100, value, 1.0, 0.0)
        for dropout, heads in ((0.1, ("ada", "max")), (0.02, ("max",)))
        for head in heads
        for seed, value in enumerate((-1.0, -2.0))
    ]
    columns = ["counts", "dropout", "pooling", "seed", "env_steps", *METRICS]
    table = pd.DataFrame(rows, columns=columns)
    last_cells = [line.split("|")[-2].strip() for line in markdown(table).splitlines()]
    assert last_cells[2:] == ["", "", "0.50"]
    text = "return_mean, dropout 0.1: ada - max = 0.00, p = 1.000"
    assert leads_text(table) == text
    # Of six ways to exchange two seeds each, two have as large a difference.
    entropies = table["pooling"].map({"ada": 1.0, "max": 3.0})
    text = "agent/entropy, dropout 0.1: ada - max = -2.00, p = 0.333"
    assert leads_text(table.assign(**{ENTROPY: entropies}), ENTROPY) == text
