"""The study of dropout: AdaPool's lead over another head, by permutation."""

import numpy as np
import pandas as pd
import pytest
from dropout_study import lead
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
