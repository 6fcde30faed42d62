"""Points in the plane from random mixtures of Gaussians, a mixture for each row.

A row is a function of the seed and its number alone: its numbers come from streams of
`marl_pool.utils.randomness`, so that it is the same in any batch and on any machine,
and a task never needs the memory of the whole data set.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

Bounds = tuple[int, int]
"""The smallest and the largest of a whole number that is drawn uniformly."""

MIXTURE, POINTS = 1, 2
"""Streams of a row: for its mixture and for its points."""
DEGREES = 4
"""Of freedom of the inverse Wishart distribution."""
SPREAD = 0.05
"""Its scale matrix is this times the identity."""
SIDE, DEVIATION = 4.0, 0.3
"""Of four Gaussians: means lie in (-SIDE, SIDE)²; standard deviation."""


class Mixtures(NamedTuple):
    """Mixtures and what was drawn from them.

    Attributes:
        points: ``(B, N, 2)`` float32, zero under padding.
        labels: ``(B, N)`` int64, the component of each point; zero under padding.
        padding: ``(B, N)`` bool, True where there is no point.
        weights: ``(B, C)`` float32, of the components; zero where there is none.
        means: ``(B, C, 2)`` float32.
        factors: ``(B, C, 2, 2)`` float32; a covariance is ``factor @ factorᵀ``.
    """

    points: Tensor
    labels: Tensor
    padding: Tensor
    weights: Tensor
    means: Tensor
    factors: Tensor

    @property
    def num_clusters(self) -> Tensor:
        """Return the number of components of each mixture, ``(B,)``."""
        return (self.weights > 0).sum(1)


def wishart_mixtures(
    rows: Tensor,
    seed: int,
    entities: Bounds = (100, 1000),
    clusters: Bounds = (3, 10),
) -> Mixtures:
    """Draw mixtures with clusters of any shape, and points of them.

    Numbers of points and clusters are uniform, both ends included. Centres are
    standard normal, covariances inverse Wishart with 4 degrees of freedom and scale
    0.05 I, and each point is of any cluster with the same probability.

    Source: SWARM (Vollgraf, 2019), section 4.1.1. That covariance is
    ``0.05 (A Aᵀ)⁻¹`` with Bartlett's lower triangular A: ``A_11² ~ χ²(4)``,
    ``A_22² ~ χ²(3)``, ``A_21 ~ N(0, 1)``.

    Args:
        rows: ``(B,)`` int64 numbers of the mixtures.
        seed: of all of them, at least 0.
        entities: bounds of the number of points.
        clusters: bounds of the number of components; C is the larger.

    Raises:
        InputError: bounds below 1 or in the wrong order.
    """
    check_bounds("entities", entities)
    check_bounds("clusters", clusters)
    most = clusters[1]
    drawn = _uniform(rows, seed, MIXTURE, 2 + 7 * most)
    count = _integer(drawn[:, 1], clusters)
    there = torch.arange(most, device=rows.device) < count[:, None]
    each = drawn[:, 2:].unflatten(1, (most, 7)).unbind(-1)
    means = torch.stack(_normal(each[0], each[1]), -1)
    below, normal = _normal(each[2], each[3])
    first = (-2 * (each[4].log() + each[5].log())).sqrt()
    second = (normal.square() - 2 * each[6].log()).sqrt()
    upper = torch.stack([1 / first, -below / (first * second)], -1)
    lower = torch.stack([torch.zeros_like(second), 1 / second], -1)
    factors = math.sqrt(SPREAD) * torch.stack([upper, lower], -2)
    weights = there / count[:, None].double()
    return _sample(rows, seed, _integer(drawn[:, 0], entities), weights, means, factors)


def four_gaussians(
    rows: Tensor, seed: int, entities: Bounds = (100, 500), clusters: int = 4
) -> Mixtures:
    """Draw mixtures of round clusters of one size, and points of them.

    The number of points is uniform, both ends included. Means are uniform in
    (-4, 4)², standard deviations are 0.3, weights from a flat Dirichlet distribution.

    Source: SWARM (Vollgraf, 2019), section 4.2, after Lee et al. (2019).

    Args:
        rows: ``(B,)`` int64 numbers of the mixtures.
        seed: of all of them, at least 0.
        entities: bounds of the number of points.
        clusters: C, components of each mixture.

    Raises:
        InputError: bounds below 1 or in the wrong order.
    """
    check_bounds("entities", entities)
    drawn = _uniform(rows, seed, MIXTURE, 1 + 3 * clusters)
    each = drawn[:, 1:].unflatten(1, (clusters, 3))
    means = SIDE * (2 * each[..., :2] - 1)
    exponential = -each[..., 2].log()
    weights = exponential / exponential.sum(1, keepdim=True)
    eye = torch.eye(2, dtype=torch.float64, device=rows.device)
    factors = (DEVIATION * eye).expand(*weights.shape, 2, 2)
    return _sample(rows, seed, _integer(drawn[:, 0], entities), weights, means, factors)


def log_densities(mixtures: Mixtures) -> Tensor:
    """Return ``log(weight_c N(point_i; mean_c, covariance_c))``, ``(B, N, C)``.

    Minus infinity for a component that is not there.
    """
    inverse = torch.linalg.inv(mixtures.factors)
    apart = mixtures.points[:, :, None] - mixtures.means[:, None]
    white = torch.einsum("bcde,bnce->bncd", inverse, apart)
    volume = mixtures.factors.det().abs().log() + math.log(2 * math.pi)
    return (
        mixtures.weights.log()[:, None] - volume[:, None] - white.square().sum(-1) / 2
    )


def check_bounds(name: str, bounds: Bounds) -> None:
    """Refuse bounds below 1 or in the wrong order."""
    if not 1 <= bounds[0] <= bounds[1]:
        raise InputError(
            f"{name}: expected two whole numbers >= 1, the smaller first, "
            f"got {list(bounds)}"
        )


def _sample(
    rows: Tensor,
    seed: int,
    sizes: Tensor,
    weights: Tensor,
    means: Tensor,
    factors: Tensor,
) -> Mixtures:
    """Draw ``sizes (B,)`` points of mixtures, padded to the largest of them."""
    most = int(sizes.max())
    drawn = _uniform(rows, seed, POINTS, 3 * most).unflatten(1, (most, 3))
    ends = weights.cumsum(1)
    # The last end may round to less than the largest number drawn.
    last = (weights > 0).sum(1, keepdim=True) - 1
    labels = torch.searchsorted(ends, drawn[..., 0].contiguous()).minimum(last)
    normal = torch.stack(_normal(drawn[..., 1], drawn[..., 2]), -1)
    pick = labels[..., None].expand(-1, -1, 4)
    own = factors.flatten(2).gather(1, pick).unflatten(-1, (2, 2))
    points = means.gather(1, pick[..., :2]) + (own @ normal[..., None])[..., 0]
    padding = torch.arange(most, device=rows.device) >= sizes[:, None]
    return Mixtures(
        points.masked_fill(padding[..., None], 0).float(),
        labels.masked_fill(padding, 0),
        padding,
        weights.float(),
        means.float(),
        factors.float(),
    )


def _uniform(rows: Tensor, seed: int, stream: int, count: int) -> Tensor:
    keys = stream_keys(
        seed, rows, torch.zeros_like(rows), Purpose.LEARNING, part=stream
    )
    return uniform(keys, count)


def _integer(drawn: Tensor, bounds: Bounds) -> Tensor:
    """Turn numbers in (0, 1) into whole ones between ``bounds``, uniformly."""
    low, high = bounds
    return low + (drawn * (high - low + 1)).long().clamp(max=high - low)


def _normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Turn two numbers in (0, 1) into two normal ones (Box and Muller, 1958)."""
    radius = (-2 * first.log()).sqrt()
    angle = 2 * math.pi * second
    return radius * angle.cos(), radius * angle.sin()
