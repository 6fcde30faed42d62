"""Amortised maximum likelihood: estimate a mixture's parameters from its points."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.studies.swarm import data
from marl_pool.studies.swarm.point_task import PointTask
from marl_pool.training.supervised.task import Batch, validate_part
from marl_pool.utils.types import PositiveInt

LEAST = 1e-3
"""Minimum standard deviation of a fitted Gaussian."""


class Parameters(NamedTuple):
    """Mixtures of Gaussians with independent coordinates."""

    log_weights: Tensor
    """``(B, C)``."""
    means: Tensor
    """``(B, C, 2)``."""
    deviations: Tensor
    """``(B, C, 2)``, above 0."""


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

    num_samples: PositiveInt = 500_000
    num_test: PositiveInt = 10_000
    entities: data.Bounds = (100, 500)
    num_components: PositiveInt = 4
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
        there = ~mixtures.padding
        # Fit one Gaussian by its moments.
        each = there[..., None] / there.sum(1)[:, None, None]
        mean = (mixtures.points * each).sum(1, keepdim=True)
        variance = ((mixtures.points - mean).square() * each).sum(1, keepdim=True)
        deviations = variance.sqrt().clamp(min=LEAST)
        one = Parameters(torch.zeros_like(mean[..., 0]), mean, deviations)
        true = data.log_densities(mixtures).logsumexp(-1)
        return {
            "true mixture": -mixtures.mean_over_points(true),
            "one Gaussian": -mean_log_likelihood(one, mixtures),
        }


def to_parameters(results: Tensor) -> Parameters:
    """Convert a network's output ``(B, 5 C)`` to parameters."""
    each = results.unflatten(-1, (-1, 5))
    return Parameters(
        each[..., 0].log_softmax(-1),
        each[..., 1:3],
        nn.functional.softplus(each[..., 3:]),
    )


def mean_log_likelihood(parameters: Parameters, sets: data.Mixtures) -> Tensor:
    r"""Compute the mean log-likelihood of each set's points, ``(B,)``.

    .. math:: \frac{1}{N} \sum_i \log \sum_c w_c
        \prod_d \mathcal{N}(x_{id}; \mu_{cd}, \sigma_{cd}^2)
    """
    deviations = parameters.deviations[:, None]
    white = (sets.points[:, :, None] - parameters.means[:, None]) / deviations
    each = -white.square() / 2 - deviations.log() - math.log(2 * math.pi) / 2
    likelihood = (each.sum(-1) + parameters.log_weights[:, None]).logsumexp(-1)
    return sets.mean_over_points(likelihood)
