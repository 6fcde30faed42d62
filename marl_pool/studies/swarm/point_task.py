"""Base of the tasks on point sets: data on demand, padding, order."""

from abc import abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from marl_pool.studies.swarm.data import Mixtures
from marl_pool.studies.swarm.padded import by_length, in_new_order
from marl_pool.studies.swarm.points import PointNetwork, is_equivariant
from marl_pool.training.supervised.task import Batch, LossAndMetrics, Part, Split, Task
from marl_pool.utils.randomness import EVALUATION_ENVS


class PointTask(Task):
    """Task on points in the plane, sampled from mixtures of Gaussians.

    Encoders that depend on the order of the points are trained with random orders, as
    in the SWARM paper (https://arxiv.org/abs/1906.09400).

    Args:
        encoder: encoder of the points.
        pooling: pooling head of the set; None: one output for each point.
        dropout: dropout probability of the encoder.
        num_samples: sets for training and validation.
        num_test: sets of the test set.
        entities: bounds of the number of points in a set.
        num_results: width of the network's output.
    """

    metric = "loss"

    def __init__(
        self,
        *,
        encoder: Part,
        pooling: Part | None,
        dropout: float,
        num_samples: int,
        num_test: int,
        entities: tuple[int, int],
        num_results: int,
    ) -> None:
        self.encoder, self.pooling, self.dropout = encoder, pooling, dropout
        self.num_train, self.num_test = num_samples, num_test
        self.entities, self.num_results = (entities[0], entities[1]), num_results

    @abstractmethod
    def sample(self, rows: Tensor, entities: tuple[int, int]) -> Mixtures:
        """Sample the sets of the given ``(B,)`` row numbers."""

    @abstractmethod
    def score(self, network: nn.Module, mixtures: Mixtures) -> dict[str, Tensor]:
        """Apply a network; return ``loss`` and other metrics of each set, ``(B,)``."""

    def prepare(self, folder: Path) -> None:
        """Do nothing: sets are sampled on demand."""

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Sample the sets of the given rows; return the fields of `Mixtures`."""
        # Offset the rows of the test set, so that no training set is among them.
        rows = rows + EVALUATION_ENVS if split == "test" else rows
        return self.sample(rows, self.entities)._asdict()

    def make_network(self, seed: int) -> nn.Module:
        """Build a `PointNetwork`."""
        return PointNetwork(
            2,
            self.num_results,
            self.entities[1],
            encoder=self.encoder,
            pooling=self.pooling,
            dropout=self.dropout,
            seed=seed,
        )

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        """Return the mean loss of the sets, and the metrics of `score`."""
        if network.training and not is_equivariant(network):
            batch = in_new_order(batch, generator)
        # Score chunks of similar length, then restore the order of the batch.
        chunks, back = by_length(batch)
        scores = [self.score(network, Mixtures(**chunk)) for chunk in chunks]
        each = {name: torch.cat([s[name] for s in scores])[back] for name in scores[0]}
        metrics = {name: part.detach() for name, part in each.items()}
        return LossAndMetrics(each[self.metric].mean(), metrics)
