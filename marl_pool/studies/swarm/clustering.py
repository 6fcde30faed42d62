"""Amortised clustering: a cluster for each point, by one pass of a network."""

from pathlib import Path

import torch
from torch import Tensor, nn

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
from marl_pool.utils.randomness import EVALUATION_WORLDS
from marl_pool.utils.types import PositiveInt, Probability, Seed

PICTURE_ENTITIES = 500
"""At most, of the set that is drawn, as in Figure 4."""
SPREAD_SETS, SPREAD_ORDERS = 50, 30
"""Test sets and orders of each in the picture of how far the order matters, where the
paper has 100 and 1,000."""


class Clustering(PointTask):
    """Assign the points of a random mixture of Gaussians to its clusters.

    The network gives each point probabilities of ``num_outputs`` clusters. Which output
    stands for which cluster is free, so the loss is the mean negative log-likelihood of
    a set's points under the best assignment of outputs to clusters (`match_clusters`),
    and a batch's the mean over its sets.

    The hold-out test set is the paper's validation set, from which it also
    reports; validation here has sets of its own.

    Source: SWARM (Vollgraf, 2019), section 4.1. Its data are 9,000 and 1,000 sets, the
    same for all experiments: so ``data_seed`` is apart from the run's seed.

    Args:
        encoder: to compare; there is no pooling.
        pooling: must be ``none``.
        dropout: of the encoder.
        num_samples: for training and validation.
        num_test: held out.
        entities: bounds of the number of points in a set.
        clusters: bounds of the number of clusters.
        num_outputs: K, at least the largest number of clusters.
        data_seed: of the sets.
        picture_grid: cells of the pictures of confidence, in each direction; each is
            an entity added to the set.

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

    def draw(self, rows: Tensor, entities: tuple[int, int]) -> Mixtures:
        """Draw the mixtures of section 4.1; see `PointTask.draw`."""
        return wishart_mixtures(rows, self.data_seed, entities, self.clusters)

    def score(self, network: nn.Module, mixtures: Mixtures) -> dict[str, Tensor]:
        """The matched loss and the accuracy of each set; see `PointTask.score`."""
        labels, padding = mixtures.labels, mixtures.padding
        log_probs = network(mixtures.points, padding).float().log_softmax(-1)
        matched = match_clusters(log_probs, labels, padding, mixtures.num_clusters)
        right = accuracy(log_probs, labels, padding, matched.outputs)
        return {"loss": matched.losses, "accuracy": right}

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of who knows each mixture, and that of equal probabilities.

        The first is what a network that has found the mixture scores; only the match,
        which knows the labels, can gain a little on it, at most log(K!) / N.
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
        """Draw a test set's clusters, and how far the loss depends on the order."""
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
        """Measure the dependence of the test loss on the order of the entities.

        Args:
            network: in evaluation mode.
            size: entities of each set.
            generator: of the orders.

        Returns:
            ``(sets,)``, the standard deviation over orders as a share of the mean:
            Figure 3.
        """
        drawn = self._test_sets(SPREAD_SETS, size)
        losses = []
        for _ in range(SPREAD_ORDERS):
            batch = in_new_order(drawn._asdict(), generator)
            losses.append(self.evaluate(network, batch, generator).metrics["loss"])
        every = torch.stack(losses)
        return every.std(0) / every.mean(0)

    def _test_sets(self, count: int, size: int) -> Mixtures:
        """Test sets with their clusters, and ``size`` points each."""
        rows = torch.arange(count) + EVALUATION_WORLDS
        return self.draw(rows, (size, size))
