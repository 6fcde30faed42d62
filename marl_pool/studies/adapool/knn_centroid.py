"""KNN-centroid: predict the mean of a point's nearest neighbours."""

from pathlib import Path

import torch
from torch import Tensor, nn

from marl_pool.networks import SetNetwork, init_weights, seeded
from marl_pool.studies.adapool.knn_data import (
    Target,
    check_target,
    draw_choices,
    targets,
)
from marl_pool.studies.adapool.knn_storage import Sets
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Part,
    Split,
    Task,
    require_part,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveFloat, PositiveInt, Probability, Seed

NAME = "knn_centroid"
TYPES = ("target", "other")
PREVIEW = 8192
"""Sets to sample for the estimate of a run's cost."""


class SetRegression(nn.Module):
    """`SetNetwork` whose pooled vector is the prediction.

    A linear layer maps it to d features where its width is another.

    Args:
        network: network that pools the set.
        dim: d, features of a vector.
        init_std: standard deviation of the linear layer's initial weights.
        seed: seed of the linear layer.
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
        nothing = torch.zeros_like(types, dtype=torch.bool)
        predicted: Tensor = self.output(self.network(Tokens(features, types, nothing)))
        return predicted


class KnnCentroid(Task):
    r"""Predict the mean of the k vectors nearest to a marked one; measures signal loss.

    With the k nearest neighbours :math:`\mathcal{N}_k(x_t)` of the target point
    :math:`x_t` the loss of a prediction :math:`\hat y` is the mean squared error

    .. math::
        L = \frac{1}{d} \Big\| \hat y -
            \frac{1}{k} \sum_{x \in \mathcal{N}_k(x_t)} x \Big\|^2,

    which the paper calls the signal loss: the neighbours are signal, all other vectors
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

    Args:
        encoder: set encoder.
        pooling: pooling head.
        dropout: dropout probability of the encoder.
        init_std: standard deviation of the initial weights.
        num_vectors: N, at least 2.
        dim: d, features of a vector.
        k: neighbours, in [1, N]; N means all N - 1 other vectors. For "nearest" only.
        target: nearest, min, max or mean.
        num_samples: number of sets, including the test set.
        num_test: sets of the test set.
        data_seed: seed of the sets.

    Raises:
        InputError: no encoder or no head, an unknown target, a k larger than a set, or
            no set to train on.
    """

    metric = "mse"

    def __init__(
        self,
        *,
        encoder: Part | None,
        pooling: Part | None,
        dropout: Probability = 0.0,
        init_std: PositiveFloat = 0.02,
        num_vectors: PositiveInt = 128,
        dim: PositiveInt = 16,
        k: PositiveInt = 4,
        target: Target = "nearest",
        num_samples: PositiveInt = 1_000_000,
        num_test: PositiveInt = 100_000,
        data_seed: Seed = 0,
    ) -> None:
        self.encoder = require_part("encoder", encoder, NAME)
        self.pooling = require_part("pooling", pooling, NAME)
        check_target(target, k, num_vectors)
        if num_test >= num_samples:
            raise InputError(
                f"task.num_test: expected less than task.num_samples = {num_samples}, "
                f"got {num_test}"
            )
        self.dropout, self.init_std = dropout, init_std
        self.target, self.k = target, k
        self.num_samples, self.num_vectors, self.dim = num_samples, num_vectors, dim
        self.data_seed = data_seed
        self.num_test, self.num_train = num_test, num_samples - num_test

    def prepare(self, folder: Path) -> None:
        """Sample the sets, or open their file; see `Sets`."""
        self._sample(folder, self.num_samples)

    def preview(self, folder: Path) -> None:
        """Sample only `PREVIEW` sets, and reuse each as many rows."""
        self._sample(folder, min(self.num_samples, PREVIEW))

    def _sample(self, folder: Path, num_samples: int) -> None:
        self.sets = Sets(
            folder,
            num_samples=num_samples,
            num_vectors=self.num_vectors,
            dim=self.dim,
            seed=self.data_seed,
        )
        self.chosen = draw_choices(self.data_seed, num_samples, self.num_vectors)

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return ``features (B, N, d)``, ``types (B, N)`` and ``target (B, d)``."""
        numbers = rows.numpy() + (self.num_test if split == "train" else 0)
        # After `preview` there are fewer sets than rows: reuse them.
        if len(self.chosen) < self.num_samples:
            numbers %= len(self.chosen)
        sets, chosen = self.sets[numbers], self.chosen[numbers]
        target = torch.from_numpy(targets(sets, chosen, self.target, self.k))
        types = torch.full(sets.shape[:2], TYPES.index("other"))
        if self.target == "nearest":
            types.scatter_(1, torch.from_numpy(chosen)[:, None], SELF_TYPE)
        return {"features": torch.from_numpy(sets), "types": types, "target": target}

    def make_network(self, seed: int) -> nn.Module:
        """Build a `SetRegression`."""
        network = SetNetwork(
            TokenSpec(
                self.num_vectors,
                self.dim,
                TYPES,
                has_self=self.target == "nearest",
            ),
            encoder=self.encoder,
            pooling=self.pooling,
            type_embedding="add",
            dropout=self.dropout,
            init_std=self.init_std,
            seed=seed,
        )
        return SetRegression(network, self.dim, self.init_std, seed)

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        """Return the signal loss of each set."""
        predicted = network(batch["features"], batch["types"])
        errors = squared_error(predicted.float(), batch["target"])
        return LossAndMetrics(errors.mean(), {self.metric: errors.detach()})

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score the predictions "mean of all vectors" and "the target point"."""
        features, types = batch["features"], batch["types"]
        naive = {"centroid": features.mean(1)}
        if self.target == "nearest":
            naive["target"] = features[types == SELF_TYPE]
        return {
            name: squared_error(predicted, batch["target"])
            for name, predicted in naive.items()
        }


def squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    """Compute the mean squared error over the features, ``(B,)``."""
    return (predicted - target).square().mean(-1)
