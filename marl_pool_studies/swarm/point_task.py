"""Base of the tasks on point sets: data on demand, padding, order, and network."""

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders import ENCODERS
from marl_pool.encoders.base import Encoder
from marl_pool.networks.set_network import build_part, seeded, validate_mixing
from marl_pool.options.types import Examples, NamedOptions, Probability, Seed
from marl_pool.pooling import POOLING
from marl_pool.pooling.base import Pooling
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Split,
    Task,
    validate_part,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import EVALUATION_ENVS
from marl_pool_studies.swarm import data


class PointNetwork(nn.Module):
    """Linear layer, encoder, optional pooling head, linear layer.

    With a pooling head there is one output for each set, otherwise for each point.
    Layers keep their default initial weights, as in SWARM's published code (except its
    zero biases for mixtures).

    Differences from the SWARM paper (https://arxiv.org/abs/1906.09400): its first and
    last SWARM layers map points and outputs themselves. Here linear layers do, because
    encoders have one width; with ``dim`` as small as the outputs a SWARM layer of any
    number of units computes the same functions. A sorted LSTM sorts embedded points,
    i.e. by a learned direction in the plane, where the paper sorts by the first
    coordinate; the distribution of mixtures is isotropic.

    ``num_outputs`` is K, the width of the output, and ``num_points`` the largest N, for
    heads that depend on it; the other options are as in `PointTask`.
    """

    def __init__(
        self,
        num_outputs: int,
        num_points: int,
        *,
        encoder: NamedOptions,
        pooling: NamedOptions | None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with seeded(seed, "encoder"):
            self.encoder: Encoder = build_part(
                "encoder", encoder, ENCODERS, Encoder, {"dropout": dropout}
            )
        # The encoder determines the width of the embedding.
        width = self.encoder.dim
        if width is None:
            raise InputError("encoder.dim: expected a width for points, got null")
        with seeded(seed, "embedding"):
            self.embedding = nn.Linear(2, width)
        self.pooling: Pooling | None = None
        if pooling is not None:
            context = {
                "dim": width,
                "num_tokens": num_points,
                "has_self": False,
                "action_dim": 0,
            }
            with seeded(seed, "pooling"):
                self.pooling = build_part("pooling", pooling, POOLING, Pooling, context)
            validate_mixing(
                self.encoder, self.pooling, pooling["name"], encoder["name"]
            )
            width = self.pooling.dim_out
        with seeded(seed, "head"):
            self.head = nn.Linear(width, num_outputs)

    def forward(self, points: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map points ``(B, N, 2)`` to ``(B, N, K)``, or pooled to ``(B, K)``.

        Points are finite also under padding ``(B, N)``, where True = ignore.
        """
        x = self.embedding(points)
        if self.pooling is None:
            return self.head(self.encoder(x, padding))
        # A head may have learned tokens, which pass through the encoder.
        x, padding, types = self.pooling.prepend(x, padding)
        return self.head(self.pooling(self.encoder(x, padding), padding, types))


def is_equivariant(network: nn.Module) -> bool:
    """Return True if no encoder of the network depends on the order of the points."""
    parts = network.modules()
    return all(p.permutation_equivariant for p in parts if isinstance(p, Encoder))


@dataclass(kw_only=True, eq=False)
class PointTask(Task):
    """Task on points in the plane, sampled from mixtures of Gaussians.

    Encoders that depend on the order of the points are trained with random orders, as
    in the SWARM paper (https://arxiv.org/abs/1906.09400).
    """

    name: ClassVar[str]
    """Name of the task, for messages."""
    metric = "loss"
    num_results: int = field(init=False)
    """Width of the network's output."""

    encoder: NamedOptions | None
    """Encoder of the points."""
    pooling: NamedOptions | None = None
    """Pooling head of the set, or None for one output for each point."""
    dropout: Probability = 0.0
    """Dropout probability of the encoder."""
    num_samples: Examples
    """Sets for training and validation."""
    num_test: Examples
    """Sets of the test set."""
    entities: data.Bounds
    """Bounds of the number of points in a set."""
    data_seed: Seed = 0
    """Seed of the sets."""

    def __post_init__(self) -> None:
        self.required_encoder = validate_part("encoder", self.encoder, self.name)
        data.validate_bounds("task.entities", self.entities)
        self.num_train = self.num_samples

    @abstractmethod
    def sample(self, rows: Tensor, entities: data.Bounds) -> data.Mixtures:
        """Sample the sets of the given ``(B,)`` row numbers."""

    @abstractmethod
    def score(self, network: nn.Module, mixtures: data.Mixtures) -> dict[str, Tensor]:
        """Apply a network; return ``loss`` and other metrics of each set, ``(B,)``."""

    @override
    def prepare(self, folder: Path) -> None:
        """Do nothing: sets are sampled on demand."""

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Sample the sets of the given rows; return the fields of `Mixtures`."""
        # Offset the rows of the test set, so that no training set is among them.
        rows = rows + EVALUATION_ENVS if split == "test" else rows
        return self.sample(rows, self.entities)._asdict()

    @override
    def make_network(self, seed: int) -> nn.Module:
        return PointNetwork(
            self.num_results,
            self.entities[1],
            encoder=self.required_encoder,
            pooling=self.pooling,
            dropout=self.dropout,
            seed=seed,
        )

    @override
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        sets = data.Mixtures(**batch)
        if network.training and not is_equivariant(network):
            sets = data.in_new_order(sets, generator)
        # Score chunks of similar length, then restore the order of the batch.
        chunks, restored_order = data.by_length(sets)
        scores = [self.score(network, chunk) for chunk in chunks]
        numbers = {
            name: torch.cat([s[name] for s in scores])[restored_order]
            for name in scores[0]
        }
        metrics = {name: values.detach() for name, values in numbers.items()}
        return LossAndMetrics(numbers[self.metric].mean(), metrics)
