"""The worth of the AdaPool paper's published numbers on KNN-centroid.

Two findings, each from the formula or from the printed numbers alone, without any
training: in Tables 3 to 8 `ClsPooling` is not told which vector is the target point,
and `MaxPool`'s spreads in Table 3 come from one fold that failed.
"""

import math
import runpy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.paths import ROOT
from marl_pool.networks.set_network import SetNetwork
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool_studies.adapool.knn_centroid import TYPES, KnnCentroid
from marl_pool_studies.adapool.knn_data import CHUNK, nearest_means, sample_sets

SCRIPTS = ROOT / "scripts"
PUBLISHED = runpy.run_path(str(SCRIPTS / "knn_study.py"))["PUBLISHED"]
HEADS = ("max", "avg", "cls", "ada")
TARGET, OTHER = TYPES.index("target"), TYPES.index("other")
NUM_VECTORS, DIM = 32, 16
ROUNDING = 1e-12

# ClsToken cannot see the target


def network_of(head: str) -> SetNetwork:
    """Table 9's transformer of 12 layers below a head, in double precision."""
    encoder = {"name": "transformer", "dim": DIM, "num_layers": 12, "dim_ff": 64}
    pooling: dict[str, Any] = {"name": head}
    if head == "ada":
        pooling["num_heads"] = 8
    task = KnnCentroid(
        encoder={**encoder, "num_heads": 8},
        pooling=pooling,
        init_std=0.3,
        num_vectors=NUM_VECTORS,
        dim=DIM,
        num_samples=CHUNK,
        num_test=1,
    )
    regression: Any = task.make_network(seed=0)
    network: SetNetwork = regression.network.double().eval()
    return network


def sets() -> Tensor:
    """Eight sets, whose first vectors are the target points, as published."""
    return torch.from_numpy(sample_sets(0, 0, NUM_VECTORS, DIM)[:8]).double()


def with_exchanged_target(x: Tensor) -> Tensor:
    """The same sets with another vector as the target point."""
    order = [5, 1, 2, 3, 4, 0, *range(6, NUM_VECTORS)]
    return x[:, order]


@torch.no_grad()
def prepend_then_mark(network: SetNetwork, x: Tensor) -> Tensor:
    """The published order: prepend the class token, then mark what stands first.

    A head without a class token prepends nothing, so that the target point stands
    first and is marked.
    """
    x, _, _ = network.pooling.prepend(x)
    types = torch.full(x.shape[:2], OTHER)
    types[:, 0] = TARGET
    assert network.embedding.types is not None
    encoded = network.encoder(x + network.embedding.types(types))
    return network.pooling(encoded, None, types)


@torch.no_grad()
def mark_then_prepend(network: SetNetwork, x: Tensor) -> Tensor:
    """Mark the target point, then prepend the class token, as this package does."""
    types = torch.full(x.shape[:2], OTHER)
    types[:, 0] = SELF_TYPE
    return network(Tokens(x, types, torch.zeros_like(types, dtype=torch.bool)))


def change(predict: Any, head: str) -> float:
    """Return the change of a prediction when the target point is exchanged."""
    network, x = network_of(head), sets()
    before, after = predict(network, x), predict(network, with_exchanged_target(x))
    return float((after - before).abs().max() / before.abs().max())


def test_as_published_the_class_token_does_not_see_the_target() -> None:
    assert change(prepend_then_mark, "cls") < ROUNDING


@pytest.mark.parametrize("head", ["max", "avg", "ada"])
def test_as_published_the_other_heads_see_it(head: str) -> None:
    assert change(prepend_then_mark, head) > 1e-2


@pytest.mark.parametrize("head", HEADS)
def test_marked_right_every_head_sees_it(head: str) -> None:
    assert change(mark_then_prepend, head) > 1e-2


@pytest.mark.parametrize("head", HEADS)
def test_the_place_of_the_mark_is_the_only_difference(head: str) -> None:
    network, x = network_of(head), sets()
    difference = prepend_then_mark(network, x) - mark_then_prepend(network, x)
    same = float(difference.abs().max()) < ROUNDING
    assert same == (head != "cls")


@cache
def least_blind_loss(num_vectors: int, dim: int, k: int) -> float:
    """The least mean loss of any prediction from the set alone.

    Each vector is as likely to be the target point. So the best prediction is the mean,
    over all vectors, of the mean of their neighbors, and its loss is their variance.
    """
    vectors = sample_sets(0, 0, num_vectors, dim)
    means = [
        nearest_means(vectors, np.full(CHUNK, i), k).astype(np.float64)
        for i in range(num_vectors)
    ]
    return float(np.stack(means, 1).var(1).mean())


def columns() -> list[Any]:
    """Each column of Tables 3 to 8 in which a target point matters."""
    return [
        pytest.param(size, k, id=f"{'-'.join(map(str, size))}-{k}")
        for size, rows in PUBLISHED.items()
        for k in rows["ClsToken"]
        if k < size[0]
    ]


@pytest.mark.parametrize(("size", "k"), columns())
def test_published_class_tokens_lose_as_much_as_a_blind_head_must(
    size: tuple[int, int, int, int], k: int
) -> None:
    floor = least_blind_loss(*size[:2], k)
    assert PUBLISHED[size]["ClsToken"][k] >= floor
    assert PUBLISHED[size]["AdaPool"][k] < floor
    # The widest network reaches the floor: our sets are drawn as the published ones.
    if size == (32, 16, 64, 12):
        assert PUBLISHED[size]["ClsToken"][k] == pytest.approx(floor, rel=0.04)


# MaxPool's spread in Table 3 is one failed fold

FOLDS = 5
TABLE_3 = PUBLISHED[(128, 16, 16, 12)]
SPREADS = (0.102, 0.110, 0.093, 0.089, 0.095, 0.096, 0.096, 0.081)
"""MaxPool's in Table 3; the published script takes numpy's default, with divisor n."""
MAX_POOL = [
    (k, mean, sd)
    for (k, mean), sd in zip(TABLE_3["MaxPool"].items(), SPREADS, strict=True)
]
HALF_DIGIT = 0.0005
"""Printed to three decimals, so a mean may be larger and a spread smaller by it."""


def largest_at_least(mean: float, sd: float) -> float:
    """The least that the largest of non-negative numbers can be.

    Source: Bhatia and Davis (2000): sd² ≤ (largest - mean) · mean.
    """
    return mean + sd**2 / mean


def second_at_most(mean: float, sd: float) -> float:
    """The most that the second largest of non-negative numbers can be.

    Their sum S and their squares' Q are known. With a second largest b, Q is at most
    (S - b)² + b²: all of the rest in the largest. So b(S - b) ≤ (S² - Q) / 2, and b is
    at most S / 2. It is a bound where Q ≥ S² / 2.
    """
    total, squares = FOLDS * mean, FOLDS * (mean**2 + sd**2)
    return total / 2 - math.sqrt(max(squares / 2 - total**2 / 4, 0.0))


def bounds_without_largest(mean: float, sd: float) -> tuple[float, float]:
    """Bounds of the mean of all but the largest number.

    Source of the lower one: Samuelson (1968): largest ≤ mean + sd √(n - 1). The upper
    one bounds the second largest, too: the squares of all the others are at most the
    square of their sum, so it bounds the sum.
    """
    lower = mean - sd / math.sqrt(FOLDS - 1)
    upper = (FOLDS * mean - largest_at_least(mean, sd)) / (FOLDS - 1)
    if sd**2 >= (FOLDS / 2 - 1) * mean**2:
        upper = min(upper, second_at_most(mean, sd) / (FOLDS - 1))
    return max(lower, 0.0), upper


losses = st.lists(st.floats(0, 1), min_size=FOLDS, max_size=FOLDS)


@given(losses)
def test_the_bounds_hold_for_any_five_losses(numbers: list[float]) -> None:
    *smaller, second, largest = sorted(numbers)
    mean, sd = float(np.mean(numbers)), float(np.std(numbers))
    if mean < 1e-6:
        return
    assert largest >= largest_at_least(mean, sd) - 1e-9
    lower, upper = bounds_without_largest(mean, sd)
    # The root of a rounding error is larger than that error.
    assert lower - 1e-9 <= (sum(smaller) + second) / (FOLDS - 1) <= upper + 1e-7
    if sd**2 >= (FOLDS / 2 - 1) * mean**2:
        assert second <= second_at_most(mean, sd) + 1e-7


@pytest.mark.parametrize("loss", [0.0, 0.015])
def test_the_bounds_are_reached(loss: float) -> None:
    numbers = [loss] * 4 + [0.25]
    mean, sd = float(np.mean(numbers)), float(np.std(numbers))
    lower, upper = bounds_without_largest(mean, sd)
    assert lower == pytest.approx(loss)
    if loss == 0:
        assert largest_at_least(mean, sd) == pytest.approx(0.25)
        assert second_at_most(mean, sd) == pytest.approx(0)
        assert upper == pytest.approx(0)


@pytest.mark.parametrize(("k", "mean", "sd"), MAX_POOL)
def test_one_fold_of_max_pool_failed(k: int, mean: float, sd: float) -> None:
    mean, sd = mean + HALF_DIGIT, sd - HALF_DIGIT
    largest = largest_at_least(mean, sd)
    # Worse than to predict the centroid of all, and than to predict the target point.
    assert largest > max(TABLE_3["centroid"][k], TABLE_3["target"][k])
    assert largest > 0.18
    # And no second fold is like it.
    assert largest > 2 * second_at_most(mean, sd)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        *((1, 0.015), (2, 0.006), (4, 0.0035), (8, 0.0005)),
        *((16, 0.0), (32, 0.007), (64, 0.020), (128, 0.0055)),
    ],
)
def test_the_four_other_folds_if_they_are_alike(k: int, expected: float) -> None:
    mean, sd = next(row[1:] for row in MAX_POOL if row[0] == k)
    lower, _ = bounds_without_largest(mean, sd)
    assert lower == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("k", "mean", "sd"), MAX_POOL)
def test_where_the_other_folds_beat_adapool(k: int, mean: float, sd: float) -> None:
    """The printed numbers alone decide, whatever the five losses were."""
    ada = TABLE_3["AdaPool"][k]
    _, most = bounds_without_largest(mean + HALF_DIGIT, sd - HALF_DIGIT)
    least, _ = bounds_without_largest(mean - HALF_DIGIT, sd + HALF_DIGIT)
    if k <= 16:
        assert most < ada - HALF_DIGIT
    else:
        assert least > ada + HALF_DIGIT
