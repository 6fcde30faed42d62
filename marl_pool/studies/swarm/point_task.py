"""Base of the tasks on point sets: data on demand, padding, order."""

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.studies.swarm import data
from marl_pool.studies.swarm.points import PointNetwork, is_equivariant
from marl_pool.training.supervised.task import (
    Batch,
    LossAndMetrics,
    Part,
    Split,
    Task,
    validate_part,
)
from marl_pool.utils.randomness import EVALUATION_ENVS
from marl_pool.utils.types import PositiveInt, Probability, Seed


@dataclass(kw_only=True, eq=False)
class PointTask(Task):
    """Task on points in the plane, sampled from mixtures of Gaussians.

    Encoders that depend on the order of the points are trained with random orders, as
    in the SWARM paper (https://arxiv.org/abs/1906.09400).

    Attributes:
        num_results: width of the network's output.
    """

    name: ClassVar[str]
    """Name of the task, for messages."""
    metric = "loss"
    num_results: int = field(init=False)

    encoder: Part | None
    """Encoder of the points."""
    pooling: Part | None = None
    """Pooling head of the set; None: one output for each point."""
    dropout: Probability = 0.0
    """Dropout probability of the encoder."""
    num_samples: PositiveInt
    """Sets for training and validation."""
    num_test: PositiveInt
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
            2,
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
        chunks, back = data.by_length(sets)
        scores = [self.score(network, chunk) for chunk in chunks]
        each = {name: torch.cat([s[name] for s in scores])[back] for name in scores[0]}
        metrics = {name: part.detach() for name, part in each.items()}
        return LossAndMetrics(each[self.metric].mean(), metrics)
