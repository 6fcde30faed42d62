"""The study of dropout: AdaPool's lead over another head, by permutation."""

import numpy as np
import pandas as pd
import pytest
from dropout_study import ENTROPY, METRICS, lead, leads_text, markdown
from scipy.stats import permutation_test


def finals(levels: dict[str, dict[str, list[float]]]) -> pd.Series:
    rows = {
        (level, head, seed): value
        for level, heads in levels.items()
        for head, values in heads.items()
        for seed, value in enumerate(values)
    }
    names = ["counts", "pooling", "seed"]
    return pd.Series(rows.values(), pd.MultiIndex.from_tuples(rows, names=names))


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
