"""Amortised inference on points: their clusters, or the mixture that they are from."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.types import Examples, Repeats, Size
from marl_pool.training.supervised.task import Batch, validate_no_part, validate_part
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import EVALUATION_ENVS
from marl_pool_studies.swarm import data
from marl_pool_studies.swarm.plots import draw_clustering, draw_spread
from marl_pool_studies.swarm.point_task import PointTask, is_equivariant

PICTURE_ENTITIES = 500
"""Maximum points of the set in the plot, as in Figure 4."""
SPREAD_SETS, SPREAD_ORDERS = 50, 30
"""Test sets, and orders of each, for the plot of the dependence on the order; the paper
has 100 and 1,000."""
LEAST = 1e-3
"""Minimum standard deviation of a fitted Gaussian."""


@dataclass(kw_only=True, eq=False)
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

    Raises:
        InputError: no encoder, a pooling head, bounds in the wrong order, or more
            clusters than outputs.
    """

    name = "clustering"

    num_samples: Examples = 9000
    num_test: Examples = 1000
    entities: data.Bounds = (100, 1000)
    clusters: data.Bounds = (3, 10)
    """Bounds of the number of clusters."""
    num_outputs: Size = 10
    """K, at least the largest number of clusters."""
    picture_grid: Size = 48
    """Cells of the probability maps in each direction; each cell is an entity added to
    the set."""

    def __post_init__(self) -> None:
        validate_no_part("pooling", self.pooling, self.name)
        super().__post_init__()
        data.validate_bounds("task.clusters", self.clusters)
        if self.clusters[1] > self.num_outputs:
            raise InputError(
                f"task.num_outputs: expected at least {self.clusters[1]}, the largest "
                f"number of clusters, got {self.num_outputs}"
            )
        self.num_results = self.num_outputs

    @override
    def sample(self, rows: Tensor, entities: data.Bounds) -> data.Mixtures:
        return data.wishart_mixtures(rows, self.data_seed, entities, self.clusters)

    @override
    def score(self, network: nn.Module, mixtures: data.Mixtures) -> dict[str, Tensor]:
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
        mixtures = data.Mixtures(**batch)
        posterior = data.log_densities(mixtures).log_softmax(-1)
        label_log_probs = posterior.gather(2, mixtures.labels[..., None])[..., 0]
        true_mixture = -mixtures.mean_over_points(label_log_probs)
        equal = torch.full_like(true_mixture, self.num_results).log()
        return {"true mixture": true_mixture, "equal probabilities": equal}

    @override
    @torch.no_grad()
    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        # Assign the points of a set to outputs, and match outputs with true clusters.
        first = self._test_sets(1, min(PICTURE_ENTITIES, self.entities[1]))
        log_probs = network(first.points, None).log_softmax(-1)
        outputs, _ = match_clusters(
            log_probs, first.labels, first.padding, first.num_clusters
        )
        files = draw_clustering(
            network, first, log_probs[0], outputs[0], folder, self.picture_grid
        )
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

        Return the relative standard deviation of the loss over random orders of the
        same sets of ``size`` entities, ``(sets,)``: Figure 3.
        """
        sets = self._test_sets(SPREAD_SETS, size)
        losses = []
        for _ in range(SPREAD_ORDERS):
            batch = data.in_new_order(sets, generator)._asdict()
            losses.append(self.evaluate(network, batch, generator).metrics["loss"])
        stacked_losses = torch.stack(losses)
        return stacked_losses.std(0) / stacked_losses.mean(0)

    def _test_sets(self, count: int, size: int) -> data.Mixtures:
        """Sample the first test sets, with ``size`` points each."""
        rows = torch.arange(count) + EVALUATION_ENVS
        return self.sample(rows, (size, size))


@dataclass(kw_only=True, eq=False)
class MixtureLikelihood(PointTask):
    """Estimate the mixture of Gaussians that a set of points was sampled from.

    The network maps the set to a logit of the weight, a mean and two standard
    deviations (by softplus) for each of C components: 5 C numbers. The loss is the mean
    negative log-likelihood of the set's own points; see `mean_log_likelihood`.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.2, after
    Lee et al. (2019, https://arxiv.org/abs/1810.00825). Its "pooling" is
    ``pooling=avg``, because a linear layer commutes with the mean. Its PMA is
    ``pooling=pma`` with four seeds and heads; its code has one more attention block
    between the seeds, which the paper does not mention. It trains for one epoch on
    500,000 sets. Its SWARM layer has the default, causal pooling, so that the estimate
    depends on the order of the points, whereas the text describes the mean. Presets:
    ``encoder=paper_swarm_mixture``, as published, and ``paper_swarm_mixture_mean``.

    Raises:
        InputError: no encoder or no pooling head, or bounds in the wrong order.
    """

    name = "mixture"

    num_samples: Examples = 500_000
    num_test: Examples = 10_000
    entities: data.Bounds = (100, 500)
    num_components: Repeats = 4
    """C, components of the data and of the estimate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_part("pooling", self.pooling, self.name)
        self.num_results = 5 * self.num_components

    @override
    def sample(self, rows: Tensor, entities: data.Bounds) -> data.Mixtures:
        return data.four_gaussians(rows, self.data_seed, entities, self.num_components)

    @override
    def score(self, network: nn.Module, mixtures: data.Mixtures) -> dict[str, Tensor]:
        output = network(mixtures.points, mixtures.padding).float()
        likelihood = mean_log_likelihood(to_parameters(output), mixtures)
        return {"loss": -likelihood, "log_likelihood": likelihood}

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score the true mixture, and one Gaussian fitted to the set.

        A fit to a set's own points can be slightly better than the true mixture. A set
        of one point has a Gaussian with the standard deviation `LEAST`.
        """
        mixtures = data.Mixtures(**batch)
        present = ~mixtures.padding
        # Fit one Gaussian by its moments.
        weights = present[..., None] / present.sum(1)[:, None, None]
        mean = (mixtures.points * weights).sum(1, keepdim=True)
        variance = ((mixtures.points - mean).square() * weights).sum(1, keepdim=True)
        deviations = variance.sqrt().clamp(min=LEAST)
        single_gaussian = Parameters(torch.zeros_like(mean[..., 0]), mean, deviations)
        true = data.log_densities(mixtures).logsumexp(-1)
        return {
            "true mixture": -mixtures.mean_over_points(true),
            "one Gaussian": -mean_log_likelihood(single_gaussian, mixtures),
        }


class Matched(NamedTuple):
    """Outputs matched to clusters."""

    outputs: Tensor
    """``(B, C)`` int64, output of each cluster; -1 for an absent cluster."""
    losses: Tensor
    """``(B,)``, mean negative log-likelihood of a set's entities under the match, with
    a gradient."""


def match_clusters(
    log_probs: Tensor, labels: Tensor, padding: Tensor, num_clusters: Tensor
) -> Matched:
    r"""Assign a distinct output to each cluster, with the greatest likelihood.

    .. math:: \min_\pi -\frac{1}{N} \sum_{i=1}^{N} \log p_i(\pi(c_i))

    over injective maps :math:`\pi` of the C clusters to the K outputs, with the label
    :math:`c_i` of entity i. It is a rectangular assignment problem with the costs
    :math:`-\sum_{i: c_i = c} \log p_i(k)`. The gradient flows through the matched
    terms; the loss has a kink where the best assignment changes.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.1, by
    the Hungarian algorithm (Kuhn, 1955), here scipy's `linear_sum_assignment`.

    Args:
        log_probs: ``(B, N, K)``, log-probabilities of each entity, finite also under
            padding.
        labels: ``(B, N)`` int64 in [0, C).
        padding: ``(B, N)`` bool, True = ignore.
        num_clusters: ``(B,)``, clusters of each set, at most K.
    """
    from scipy.optimize import linear_sum_assignment

    # Assign without a gradient, which passes through the scores. Replace NaN for scipy
    # only: in the loss it stays and stops the run.
    scores = cluster_scores(log_probs, labels, padding)
    table = scores.detach().double().nan_to_num().cpu().numpy()
    assigned = torch.full(scores.shape[:2], -1)
    for row, count in enumerate(num_clusters.tolist()):
        _, best = linear_sum_assignment(-table[row, :count])
        assigned[row, :count] = torch.from_numpy(best)
    outputs = assigned.to(scores.device)
    matched_scores = scores.gather(2, outputs.clamp(min=0)[..., None])[..., 0]
    total = matched_scores.masked_fill(outputs < 0, 0.0).sum(1)
    return Matched(outputs, -total / (~padding).sum(1).clamp(min=1))


def cluster_scores(log_probs: Tensor, labels: Tensor, padding: Tensor) -> Tensor:
    """Sum ``log p_i(k)`` over the entities of each cluster: ``(B, clusters, K)``.

    The number of rows is K, too; rows beyond the clusters are zero.
    """
    outputs = log_probs.shape[-1]
    scores = log_probs.new_zeros(len(log_probs), outputs, outputs)
    clusters = labels[..., None].expand_as(log_probs)
    return scores.scatter_add(1, clusters, log_probs.masked_fill(padding[..., None], 0))


def accuracy(
    log_probs: Tensor, labels: Tensor, padding: Tensor, outputs: Tensor
) -> Tensor:
    """Compute the fraction of entities whose likeliest output is their cluster's.

    ``outputs`` and the other arguments are as in `match_clusters`. The result is
    ``(B,)``, in [0, 1].
    """
    right = (log_probs.argmax(-1) == outputs.gather(1, labels)) & ~padding
    return right.sum(1) / (~padding).sum(1).clamp(min=1)


class Parameters(NamedTuple):
    """Mixtures of Gaussians with independent coordinates."""

    log_weights: Tensor
    """``(B, C)``."""
    means: Tensor
    """``(B, C, 2)``."""
    deviations: Tensor
    """``(B, C, 2)``, above 0."""


def to_parameters(results: Tensor) -> Parameters:
    """Convert a network's output ``(B, 5 C)`` to parameters."""
    components = results.unflatten(-1, (-1, 5))
    return Parameters(
        components[..., 0].log_softmax(-1),
        components[..., 1:3],
        nn.functional.softplus(components[..., 3:]),
    )


def mean_log_likelihood(parameters: Parameters, sets: data.Mixtures) -> Tensor:
    r"""Compute the mean log-likelihood of each set's points, ``(B,)``.

    .. math:: \frac{1}{N} \sum_i \log \sum_c w_c
        \prod_d \mathcal{N}(x_{id}; \mu_{cd}, \sigma_{cd}^2)
    """
    deviations = parameters.deviations[:, None]
    white = (sets.points[:, :, None] - parameters.means[:, None]) / deviations
    log_densities = -white.square() / 2 - deviations.log() - math.log(2 * math.pi) / 2
    likelihood = (log_densities.sum(-1) + parameters.log_weights[:, None]).logsumexp(-1)
    return sets.mean_over_points(likelihood)
