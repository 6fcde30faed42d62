"""The KNN-centroid task: where is the middle of a point's nearest neighbours?"""

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
    Outcome,
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
"""Sets that are drawn to see what a run costs."""


class SetRegression(nn.Module):
    """A `SetNetwork` whose pooled vector is the prediction.

    A linear layer makes it as wide as the vectors are, where it is not.

    Args:
        network: the one that pools.
        dim: d, the width of the vectors.
        init_std: standard deviation of that layer's weights.
        seed: of that layer.
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
    """Predict the mean of the k vectors nearest to a marked one: signal loss.

    The loss is the mean squared error over the d features, which the paper calls the
    signal loss: the k neighbours are signal, all other vectors noise. A learned
    embedding, added to a vector, says whether it is the target point. With a target of
    "min", "max" or "mean" no vector is marked, and what is to be predicted is each
    feature's smallest, largest or mean value (B.3); without a point of its own
    AdaPool's query is then the mean, and ``pooling.query=[0]`` the other choice.

    The prediction is the pooled vector itself. So a transformer of 12 layers and width
    16 has 38,624 parameters with `avg` and 39,648 with `ada`, of which 32 are the two
    types' embeddings. Where the width is another than d, one linear layer leads to it
    and one back (B.5).

    Source: the AdaPool paper, sections 4.1, 4.2, B.3 to B.5, C.1 and C.2. Where we
    differ: the hold-out test set is the first ``num_test`` of the ``num_samples`` sets,
    so that it is the same however many are left to train on.

    Args:
        encoder: below the head.
        pooling: the head that is compared.
        dropout: of the encoder.
        init_std: standard deviation of the initial weights.
        num_vectors: N, at least 2.
        dim: d, features of a vector.
        k: neighbours, in [1, N]; N means the N - 1 that there are. For "nearest" only.
        target: nearest, min, max or mean.
        num_samples: sets, those of the test set among them.
        num_test: sets that are held out.
        data_seed: of the sets.

    Raises:
        InputError: no encoder or no head, an unknown target, a k that no set has, or
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
        """Draw the sets, or open the file of them; see `Sets`."""
        self._draw(folder, self.num_samples)

    def preview(self, folder: Path) -> None:
        """Draw a few sets; each stands for many."""
        self._draw(folder, min(self.num_samples, PREVIEW))

    def _draw(self, folder: Path, num_samples: int) -> None:
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
        if len(self.chosen) < self.num_samples:  # a preview
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
    ) -> Outcome:
        """Return the signal loss."""
        predicted = network(batch["features"], batch["types"])
        errors = squared_error(predicted.float(), batch["target"])
        return Outcome(errors.mean(), {self.metric: errors.detach()})

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of predicting the mean of all vectors, and of the target point."""
        features, types = batch["features"], batch["types"]
        naive = {"centroid": features.mean(1)}
        if self.target == "nearest":
            naive["target"] = features[types == SELF_TYPE]
        return {
            name: squared_error(predicted, batch["target"])
            for name, predicted in naive.items()
        }


def squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean squared error over the features, ``(B,)``."""
    return (predicted - target).square().mean(-1)
