"""KNN-centroid: predict the mean of a point's nearest neighbors."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.networks.set_network import SetNetwork, init_weights, seeded
from marl_pool.options.types import (
    AtMost,
    Examples,
    NamedOptions,
    PositiveFloat,
    Probability,
    Seed,
    Size,
)
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Split,
    Task,
    validate_part,
)
from marl_pool.utils.errors import InputError
from marl_pool_studies.adapool.knn_data import Sets, Target, sample_choices, targets

TYPES = ("target", "other")
PREVIEW = 8192
"""Sets to sample for the estimate of a run's cost."""
CONSTANT = 8192
"""Training sets that determine the constant prediction, at most."""


class SetRegression(nn.Module):
    """`SetNetwork` whose pooled vector is the prediction.

    A linear layer with weights from N(0, ``init_std``²) maps it to d = ``dim`` features
    where its width is another.
    """

    def __init__(
        self, network: SetNetwork, dim: int, init_std: float, seed: int
    ) -> None:
        super().__init__()
        self.network = network
        self.output: nn.Module = nn.Identity()
        if network.dim_out != dim:
            with seeded(seed, "output"):
                self.output = nn.Linear(network.dim_out, dim)
                init_weights(self.output, init_std)

    def forward(self, features: Tensor, types: Tensor) -> Tensor:
        """Map vectors ``(B, N, d)`` and their types ``(B, N)`` to ``(B, d)``."""
        padding = torch.zeros_like(types, dtype=torch.bool)
        predicted: Tensor = self.output(self.network(Tokens(features, types, padding)))
        return predicted


@dataclass(kw_only=True, eq=False)
class KnnCentroid(Task):
    r"""Predict the mean of the k vectors nearest to a marked one; measures signal loss.

    With the k nearest neighbors :math:`\mathcal{N}_k(x_t)` of the target point
    :math:`x_t` the loss of a prediction :math:`\hat y` is the mean squared error

    .. math::
        L = \frac{1}{d} \Big\| \hat y -
            \frac{1}{k} \sum_{x \in \mathcal{N}_k(x_t)} x \Big\|^2,

    which the paper calls the signal loss: the neighbors are signal, all other vectors
    noise. A learned type embedding marks the target point. With the targets "min",
    "max" and "mean" no vector is marked, and each feature's minimum, maximum or mean
    over the set is predicted (B.3); AdaPool's query is then the mean of the vectors, or
    the first one with ``pooling.query=[0]``.

    The prediction is the pooled vector itself. So a transformer of 12 layers and width
    16 has 38,624 parameters with `avg` and 39,648 with `ada`, of which 32 are the two
    types' embeddings. Where the width is not d, linear layers map to it and back (B.5).

    Source: AdaPool (https://arxiv.org/abs/2506.09215), sections 4.1, 4.2, B.3 to B.5,
    C.1 and C.2. Difference: the hold-out test set is the first ``num_test`` of the
    ``num_samples`` sets, so that it does not depend on the number of training sets.

    Raises:
        InputError: no encoder or no head, a k larger than a set, or no set to train on.
    """

    metric = "mse"

    encoder: NamedOptions | None
    """Set encoder."""
    pooling: NamedOptions | None
    """Pooling head."""
    dropout: Probability = 0.0
    """Dropout probability of the encoder."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    num_vectors: Annotated[int, Field(ge=2), AtMost(16_384)] = 128
    """N, vectors of a set."""
    dim: Size = 16
    """d, features of a vector."""
    k: Size = 4
    """Neighbors, in [1, N]; N means all N - 1 other vectors. For "nearest" only."""
    target: Target = "nearest"
    """nearest, min, max or mean."""
    num_samples: Examples = 1_000_000
    """Number of sets, including the test set."""
    num_test: Examples = 100_000
    """Sets of the test set."""
    data_seed: Seed = 0
    """Seed of the sets; the paper's 42 (C.1) draws other sets, by another generator."""

    def __post_init__(self) -> None:
        self.parts = {
            kind: validate_part(kind, getattr(self, kind), "knn_centroid")
            for kind in ("encoder", "pooling")
        }
        if self.target == "nearest" and self.k > self.num_vectors:
            raise InputError(
                "task.k: expected an integer in [1, task.num_vectors = "
                f"{self.num_vectors}], got {self.k}"
            )
        if self.num_test >= self.num_samples:
            raise InputError(
                "task.num_test: expected less than task.num_samples = "
                f"{self.num_samples}, got {self.num_test}"
            )
        self.num_train = self.num_samples - self.num_test

    @override
    def prepare(self, folder: Path) -> None:
        self._sample(folder, self.num_samples)

    @override
    def preview(self, folder: Path) -> None:
        # Reuse each set as many rows.
        self._sample(folder, min(self.num_samples, PREVIEW))

    def _sample(self, folder: Path, num_samples: int) -> None:
        self.sets = Sets(
            folder,
            num_samples=num_samples,
            num_vectors=self.num_vectors,
            dim=self.dim,
            seed=self.data_seed,
        )
        self.target_indices = sample_choices(
            self.data_seed, num_samples, self.num_vectors
        )

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``features (B, N, d)``, ``types (B, N)`` and ``target (B, d)``."""
        numbers = rows.numpy() + (self.num_test if split == "train" else 0)
        # After `preview` there are fewer sets than rows: reuse them.
        if len(self.target_indices) < self.num_samples:
            numbers %= len(self.target_indices)
        sets, target_indices = self.sets[numbers], self.target_indices[numbers]
        # Compute the targets of these sets only: they are cheaper than to store.
        target = torch.from_numpy(targets(sets, target_indices, self.target, self.k))
        types = torch.full(sets.shape[:2], TYPES.index("other"))
        if self.target == "nearest":
            types.scatter_(1, torch.from_numpy(target_indices)[:, None], SELF_TYPE)
        return {"features": torch.from_numpy(sets), "types": types, "target": target}

    @override
    def make_network(self, seed: int) -> nn.Module:
        has_self = self.target == "nearest"
        network = SetNetwork(
            TokenSpec(self.num_vectors, self.dim, TYPES, has_self=has_self),
            encoder=self.parts["encoder"],
            pooling=self.parts["pooling"],
            type_embedding="add",
            dropout=self.dropout,
            init_std=self.init_std,
            seed=seed,
        )
        return SetRegression(network, self.dim, self.init_std, seed)

    @override
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        predicted = network(batch["features"], batch["types"])
        errors = squared_error(predicted.float(), batch["target"])
        return LossAndMetrics(errors.mean(), {self.metric: errors.detach()})

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score "mean of all vectors", "the target point" and "a constant".

        The constant is the mean of the training sets' right answers, so that a loss as
        a share of it is 1 - R².
        """
        features, types = batch["features"], batch["types"]
        naive = {"centroid": features.mean(1), "constant": self._constant}
        if self.target == "nearest":
            naive["target"] = features[types == SELF_TYPE]
        return {
            name: squared_error(predicted, batch["target"])
            for name, predicted in naive.items()
        }

    @cached_property
    def _constant(self) -> Tensor:
        rows = torch.arange(min(self.num_train, CONSTANT))
        return self.batch("train", rows)["target"].mean(0)


def squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    """Compute the mean squared error over the features, ``(B,)``."""
    return (predicted - target).square().mean(-1)
