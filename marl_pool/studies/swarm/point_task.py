"""Base of the studies of point sets: generated data, padding and order."""

from abc import abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from marl_pool.studies.swarm.data import Mixtures
from marl_pool.studies.swarm.padded import by_length, in_new_order
from marl_pool.studies.swarm.points import PointNetwork, is_equivariant
from marl_pool.training.supervised.task import Batch, LossAndMetrics, Part, Split, Task
from marl_pool.utils.randomness import EVALUATION_WORLDS


class PointTask(Task):
    """A study of points in the plane that a mixture of Gaussians was drawn for.

    Encoders that depend on the order are shown each training set in a new one, as in
    the SWARM paper.

    Args:
        encoder: of the points.
        pooling: of the set; None: a result for each point.
        dropout: of the encoder.
        num_samples: for training and validation.
        num_test: held out.
        entities: bounds of the number of points in a set.
        num_results: width of the network's results.
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
    def draw(self, rows: Tensor, entities: tuple[int, int]) -> Mixtures:
        """Draw the sets of the given ``(B,)`` row numbers."""

    @abstractmethod
    def score(self, network: nn.Module, mixtures: Mixtures) -> dict[str, Tensor]:
        """Apply a network: ``loss`` and other metrics of each set, ``(B,)``."""

    def prepare(self, folder: Path) -> None:
        """Nothing: sets are made when they are needed."""

    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Draw the sets of the given rows: the fields of `Mixtures`."""
        # Rows of the test set are no rows of the other, however many there are.
        rows = rows + EVALUATION_WORLDS if split == "test" else rows
        return self.draw(rows, self.entities)._asdict()

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
        """Return the mean loss of the sets, and what `score` says of each."""
        if network.training and not is_equivariant(network):
            batch = in_new_order(batch, generator)
        pieces, back = by_length(batch)
        scores = [self.score(network, Mixtures(**piece)) for piece in pieces]
        each = {name: torch.cat([s[name] for s in scores])[back] for name in scores[0]}
        metrics = {name: part.detach() for name, part in each.items()}
        return LossAndMetrics(each[self.metric].mean(), metrics)
