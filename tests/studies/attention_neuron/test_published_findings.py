"""In the AdaPool paper's Tables 3 to 8 `ClsPooling` does not see the target point.

The formula shows it, and the printed numbers, without any training.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from knn_study import PUBLISHED
from torch import Tensor

from marl_pool.networks.set_network import SetNetwork
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool_studies.adapool.knn_centroid import TYPES, KnnCentroid
from marl_pool_studies.adapool.knn_data import CHUNK, nearest_means, sample_sets

TARGET, OTHER = TYPES.index("target"), TYPES.index("other")
NUM_VECTORS, DIM = 32, 16
ROUNDING = 1e-12


def network_of(head: str) -> SetNetwork:
    """Table 9's transformer of 12 layers below a head, in double precision."""
    encoder = {"name": "transformer", "dim": DIM, "num_layers": 12, "dim_ff": 64}
    pooling: dict[str, Any] = {"name": head}
    if head == "ada":
        pooling["num_heads"] = 8
    sizes = {"num_vectors": NUM_VECTORS, "dim": DIM, "num_samples": CHUNK}
    parts = {"encoder": {**encoder, "num_heads": 8}, "pooling": pooling}
    task = KnnCentroid(**parts, **sizes, init_std=0.3, num_test=1)
    regression: Any = task.make_network(seed=0)
    network: SetNetwork = regression.network.double().eval()
    return network


def sets() -> Tensor:
    """Eight sets, whose first vectors are the target points, as published."""
    return torch.from_numpy(sample_sets(0, 0, NUM_VECTORS, DIM)[:8]).double()


def with_exchanged_target(x: Tensor) -> Tensor:
    """Make another vector the target point of each set."""
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


@pytest.mark.parametrize("head", ["max", "avg", "cls", "ada"])
def test_as_published_the_class_token_alone_does_not_see_the_target(head: str) -> None:
    assert (change(prepend_then_mark, head) < ROUNDING) == (head == "cls")
    assert change(mark_then_prepend, head) > 1e-2
    # The place of the mark is the only difference.
    network, x = network_of(head), sets()
    difference = prepend_then_mark(network, x) - mark_then_prepend(network, x)
    assert (float(difference.abs().max()) < ROUNDING) == (head != "cls")


@cache
def least_blind_loss(num_vectors: int, dim: int, k: int) -> float:
    """Return the lowest mean loss of any prediction from the set alone.

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
def test_published_class_tokens_lose_as_much_as_a_blind_head_must(size, k) -> None:
    floor = least_blind_loss(*size[:2], k)
    assert PUBLISHED[size]["ClsToken"][k] >= floor
    assert PUBLISHED[size]["AdaPool"][k] < floor
    # The widest network reaches the floor: our sets are drawn as the published ones.
    if size == (32, 16, 64, 12):
        assert PUBLISHED[size]["ClsToken"][k] == pytest.approx(floor, rel=0.04)
