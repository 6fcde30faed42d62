"""Amortised clustering: assign points to clusters in one pass of a network."""

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.studies.swarm.data import (
    Mixtures,
    check_bounds,
    log_densities,
    wishart_mixtures,
)
from marl_pool.studies.swarm.matching import accuracy, match_clusters
from marl_pool.studies.swarm.padded import in_new_order
from marl_pool.studies.swarm.point_task import PointTask
from marl_pool.studies.swarm.points import is_equivariant
from marl_pool.training.supervised.task import (
    Batch,
    Part,
    require_part,
    validate_no_part,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import EVALUATION_ENVS
from marl_pool.utils.types import PositiveInt, Probability, Seed

PICTURE_ENTITIES = 500
"""Maximum points of the set in the plot, as in Figure 4."""
SPREAD_SETS, SPREAD_ORDERS = 50, 30
"""Test sets, and orders of each, for the plot of the dependence on the order; the paper
has 100 and 1,000."""


class Clustering(PointTask):
    """Assign the points of a random mixture of Gaussians to its clusters.

    The network outputs the probabilities of ``num_outputs`` clusters for each point.
    Clusters have no names, so the loss of a set is the mean negative log-likelihood of
    its points under the best assignment of outputs to clusters; see `match_clusters`.

    The hold-out test set is the paper's validation set, whose results it reports;
    validation here has separate sets.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.1. Its
    data are 9,000 and 1,000 sets, the same for all experiments: so ``data_seed`` is
    separate from the run's seed.

    Args:
        encoder: set encoder.
        pooling: must be ``none``.
        dropout: dropout probability of the encoder.
        num_samples: sets for training and validation.
        num_test: sets of the test set.
        entities: bounds of the number of points in a set.
        clusters: bounds of the number of clusters.
        num_outputs: K, at least the largest number of clusters.
        data_seed: seed of the sets.
        picture_grid: cells of the probability maps in each direction; each cell is an
            entity added to the set.

    Raises:
        InputError: no encoder, a pooling head, bounds in the wrong order, or more
            clusters than outputs.
    """

    def __init__(
        self,
        *,
        encoder: Part | None,
        pooling: Part | None = None,
        dropout: Probability = 0.0,
        num_samples: PositiveInt = 9000,
        num_test: PositiveInt = 1000,
        entities: tuple[PositiveInt, PositiveInt] = (100, 1000),
        clusters: tuple[PositiveInt, PositiveInt] = (3, 10),
        num_outputs: PositiveInt = 10,
        data_seed: Seed = 0,
        picture_grid: PositiveInt = 48,
    ) -> None:
        validate_no_part("pooling", pooling, "clustering")
        check_bounds("task.entities", entities)
        check_bounds("task.clusters", clusters)
        if clusters[1] > num_outputs:
            raise InputError(
                f"task.num_outputs: expected at least {clusters[1]}, the largest "
                f"number of clusters, got {num_outputs}"
            )
        super().__init__(
            encoder=require_part("encoder", encoder, "clustering"),
            pooling=None,
            dropout=dropout,
            num_samples=num_samples,
            num_test=num_test,
            entities=entities,
            num_results=num_outputs,
        )
        self.clusters, self.data_seed = (clusters[0], clusters[1]), data_seed
        self.picture_grid = picture_grid

    @override
    def sample(self, rows: Tensor, entities: tuple[int, int]) -> Mixtures:
        return wishart_mixtures(rows, self.data_seed, entities, self.clusters)

    @override
    def score(self, network: nn.Module, mixtures: Mixtures) -> dict[str, Tensor]:
        labels, padding = mixtures.labels, mixtures.padding
        log_probs = network(mixtures.points, padding).float().log_softmax(-1)
        matched = match_clusters(log_probs, labels, padding, mixtures.num_clusters)
        right = accuracy(log_probs, labels, padding, matched.outputs)
        return {"loss": matched.losses, "accuracy": right}

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score the posterior of the true mixture, and equal probabilities.

        A network cannot score much better than the former: only the match, which uses
        the labels, can gain at most log(K!) / N.
        """
        mixtures = Mixtures(**batch)
        there = (~mixtures.padding).sum(1)
        posterior = log_densities(mixtures).log_softmax(-1)
        own = posterior.gather(2, mixtures.labels[..., None])[..., 0]
        known = -own.masked_fill(mixtures.padding, 0).sum(1) / there
        equal = torch.full_like(known, self.num_results).log()
        return {"true mixture": known, "equal probabilities": equal}

    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        """Plot a test set's clusters, and the dependence of the loss on the order."""
        from marl_pool.studies.swarm.plots import (
            draw_clustering,
            draw_spread,
        )

        size = min(PICTURE_ENTITIES, self.entities[1])
        first = self._test_sets(1, size)
        files = draw_clustering(network, first, folder, self.picture_grid)
        if not is_equivariant(network):
            low, high = self.entities
            sizes = dict.fromkeys((low, (low + high) // 2, high))
            spreads = {str(n): self.spread(network, n, generator) for n in sizes}
            draw_spread(spreads, folder / "orders.png")
            files.append(folder / "orders.png")
        return files

    @torch.no_grad()
    def spread(
        self, network: nn.Module, size: int, generator: torch.Generator
    ) -> Tensor:
        """Measure the dependence of the loss on the order of the entities.

        Args:
            network: network in evaluation mode.
            size: entities of each set.
            generator: source of the orders.

        Returns:
            ``(sets,)``, relative standard deviation of the loss over orders: Figure 3.
        """
        sampled = self._test_sets(SPREAD_SETS, size)
        losses = []
        for _ in range(SPREAD_ORDERS):
            batch = in_new_order(sampled._asdict(), generator)
            losses.append(self.evaluate(network, batch, generator).metrics["loss"])
        every = torch.stack(losses)
        return every.std(0) / every.mean(0)

    def _test_sets(self, count: int, size: int) -> Mixtures:
        """Sample the first test sets, with ``size`` points each."""
        rows = torch.arange(count) + EVALUATION_ENVS
        return self.sample(rows, (size, size))
