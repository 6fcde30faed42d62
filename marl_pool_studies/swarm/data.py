"""Points in the plane from random mixtures of Gaussians, a mixture for each row.

A row depends only on the seed and its number: it is sampled from the streams of
`marl_pool.utils.randomness`. So it is the same in any batch and on any machine, and a
task never holds the whole data set.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_pool.options.types import Size
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

Bounds = tuple[Size, Size]
"""Inclusive bounds of a uniformly sampled integer."""

MIXTURE, POINTS = 1, 2
"""Keys of a row's random streams, for its mixture and its points."""
SPREAD = 0.05
"""Scale matrix of the inverse Wishart distribution, times the identity."""
SIDE, DEVIATION = 4.0, 0.3
"""Bound of the coordinates of the four Gaussians' means, and standard deviation."""

POINTWISE = ("points", "labels", "padding")
"""Fields with a value for each point, ``(B, N, …)``; others are per set."""
CHUNK = 10
"""Sets computed together on a CPU."""


class Mixtures(NamedTuple):
    """Mixtures and points sampled from them."""

    points: Tensor
    """``(B, N, 2)`` float32, zero under padding."""
    labels: Tensor
    """``(B, N)`` int64, component of each point; zero under padding."""
    padding: Tensor
    """``(B, N)`` bool, True = no point."""
    weights: Tensor
    """``(B, C)`` float32, weights of the components; zero for absent ones."""
    means: Tensor
    """``(B, C, 2)`` float32."""
    factors: Tensor
    """``(B, C, 2, 2)`` float32; a covariance is ``factor @ factorᵀ``."""

    @property
    def num_clusters(self) -> Tensor:
        """Number of components of each mixture, ``(B,)``."""
        return (self.weights > 0).sum(1)

    def mean_over_points(self, values: Tensor) -> Tensor:
        """Compute the mean of ``(B, N)`` values over the points of each set."""
        count = (~self.padding).sum(1).clamp(min=1)
        return values.masked_fill(self.padding, 0.0).sum(1) / count


def wishart_mixtures(
    rows: Tensor, seed: int, entities: Bounds, clusters: Bounds = (3, 10)
) -> Mixtures:
    """Sample mixtures with clusters of any shape, and points from them.

    Numbers of points and clusters are uniform. Means are standard normal, covariances
    inverse Wishart with 4 degrees of freedom and scale 0.05 I, and a point belongs to
    each cluster with equal probability.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.1.1. The
    covariance is ``0.05 (A Aᵀ)⁻¹`` with Bartlett's lower triangular A:
    ``A_11² ~ χ²(4)``, ``A_22² ~ χ²(3)``, ``A_21 ~ N(0, 1)``.

    ``rows (B,)`` int64 are numbers of mixtures, ``entities`` and ``clusters`` bounds of
    the numbers of points and of components; C is the upper bound.
    """
    # Sample all uniform numbers of a row at once: two for the set, seven per cluster.
    most = clusters[1]
    sampled = _uniform(rows, seed, MIXTURE, 2 + 7 * most)
    # Sample the number of clusters, and mark those that exist.
    count = _integer(sampled[:, 1], clusters)
    present = torch.arange(most, device=rows.device) < count[:, None]
    columns = sampled[:, 2:].unflatten(1, (most, 7)).unbind(-1)
    # Invert Bartlett's factor A; a chi-square variable is a sum of squared normal and
    # exponential ones.
    means = torch.stack(_normal(columns[0], columns[1]), -1)
    below, normal = _normal(columns[2], columns[3])
    first = (-2 * (columns[4].log() + columns[5].log())).sqrt()
    second = (normal.square() - 2 * columns[6].log()).sqrt()
    upper = torch.stack([1 / first, -below / (first * second)], -1)
    lower = torch.stack([torch.zeros_like(second), 1 / second], -1)
    factors = math.sqrt(SPREAD) * torch.stack([upper, lower], -2)
    # All clusters of a set have the same weight.
    weights = present / count[:, None].double()
    sizes = _integer(sampled[:, 0], entities)
    return _sample(rows, seed, sizes, weights, means, factors)


def four_gaussians(
    rows: Tensor, seed: int, entities: Bounds, clusters: int = 4
) -> Mixtures:
    """Sample mixtures of isotropic Gaussians of equal size, and points from them.

    The number of points is uniform. Means are uniform in (-4, 4)², standard deviations
    are 0.3, weights are from a flat Dirichlet distribution.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.2, after
    Lee et al. (2019, https://arxiv.org/abs/1810.00825).

    ``clusters`` is C, the components of each mixture; see `wishart_mixtures` for the
    other arguments.
    """
    sampled = _uniform(rows, seed, MIXTURE, 1 + 3 * clusters)
    numbers = sampled[:, 1:].unflatten(1, (clusters, 3))
    means = SIDE * (2 * numbers[..., :2] - 1)
    # Normalized exponential variables have a flat Dirichlet distribution.
    exponential = -numbers[..., 2].log()
    weights = exponential / exponential.sum(1, keepdim=True)
    eye = torch.eye(2, dtype=torch.float64, device=rows.device)
    factors = (DEVIATION * eye).expand(*weights.shape, 2, 2)
    sizes = _integer(sampled[:, 0], entities)
    return _sample(rows, seed, sizes, weights, means, factors)


def log_densities(mixtures: Mixtures) -> Tensor:
    """Return ``log(weight_c N(point_i; mean_c, covariance_c))``, ``(B, N, C)``.

    It is minus infinity for an absent component.
    """
    # Whiten each point by each component, then add the log-determinant.
    inverse = torch.linalg.inv(mixtures.factors)
    differences = mixtures.points[:, :, None] - mixtures.means[:, None]
    white = torch.einsum("bcde,bnce->bncd", inverse, differences)
    volume = mixtures.factors.det().abs().log() + math.log(2 * math.pi)
    peak = mixtures.weights.log() - volume
    return peak[:, None] - white.square().sum(-1) / 2


def validate_bounds(name: str, bounds: Bounds) -> None:
    """Reject bounds below 1 or in the wrong order."""
    if not 1 <= bounds[0] <= bounds[1]:
        raise InputError(
            f"{name}: expected two whole numbers >= 1, the smaller first, "
            f"got {list(bounds)}"
        )


def by_length(sets: Mixtures) -> tuple[list[Mixtures], Tensor]:
    """Split a batch into chunks of similar length, without their common padding.

    Results do not change, but a CPU needs a quarter of the time for fifty sets of 100
    to 1000 points: half of the batch is padding, and a chunk fits the cache. On other
    devices a batch is one chunk.

    Returns:
        Chunks, and the indices ``(B,)`` that restore the batch's order from the
        concatenated chunks.
    """
    lengths = (~sets.padding).sum(1)
    order = lengths.argsort(stable=True)
    chunks = []
    for rows in order.split(CHUNK if order.device.type == "cpu" else len(order)):
        chunk = Mixtures(*(tensor[rows] for tensor in sets))
        longest = int(lengths[rows[-1]])
        chunks.append(_index_points(chunk, (slice(None), slice(longest))))
    return chunks, order.argsort()


def in_new_order(sets: Mixtures, generator: torch.Generator) -> Mixtures:
    """Shuffle the points of each set with a CPU generator; padding stays last."""
    padding = sets.padding
    keys = torch.rand(padding.shape, generator=generator).to(padding.device)
    order = keys.masked_fill(padding, 2.0).argsort(1)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return _index_points(sets, (rows, order))


def _sample(
    rows: Tensor,
    seed: int,
    sizes: Tensor,
    weights: Tensor,
    means: Tensor,
    factors: Tensor,
) -> Mixtures:
    """Sample ``sizes (B,)`` points of mixtures, padded to the largest set."""
    most = int(sizes.max())
    # Sample the component of each point, then the point.
    sampled = _uniform(rows, seed, POINTS, 3 * most).unflatten(1, (most, 3))
    ends = weights.cumsum(1)
    # The last end may round to less than the largest random number.
    last = (weights > 0).sum(1, keepdim=True) - 1
    labels = torch.searchsorted(ends, sampled[..., 0].contiguous()).minimum(last)
    normal = torch.stack(_normal(sampled[..., 1], sampled[..., 2]), -1)
    # Transform standard normal numbers by the factor of each point's component.
    pick = labels[..., None].expand(-1, -1, 4)
    point_factors = factors.flatten(2).gather(1, pick).unflatten(-1, (2, 2))
    offsets = (point_factors @ normal[..., None])[..., 0]
    points = means.gather(1, pick[..., :2]) + offsets
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
    episodes = torch.zeros_like(rows)
    keys = stream_keys(seed, rows, episodes, Purpose.LEARNING, part=stream)
    return uniform(keys, count)


def _integer(sampled: Tensor, bounds: Bounds) -> Tensor:
    """Map uniform numbers in (0, 1) to uniform integers between ``bounds``."""
    low, high = bounds
    return low + (sampled * (high - low + 1)).long().clamp(max=high - low)


def _normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Map two uniform numbers to two standard normal ones (Box and Muller, 1958)."""
    radius = (-2 * first.log()).sqrt()
    angle = 2 * math.pi * second
    return radius * angle.cos(), radius * angle.sin()


def _index_points(sets: Mixtures, index: Any) -> Mixtures:
    return sets._replace(**{name: getattr(sets, name)[index] for name in POINTWISE})
