"""Random sets of vectors, and the means of nearest neighbours."""

import threading
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Target = Literal["nearest", "min", "max", "mean"]
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

CHUNK = 256
"""Sets sampled together, from one generator."""
NORMAL, EXPONENTIAL, UNIFORM = range(3)
VERSION = 1
"""Version of the sampling procedure; files of other versions are not used."""
SETS, CHOICES = range(2)
"""Keys of random streams."""
_scratch = threading.local()


def sample_sets(
    seed: int, chunk: int, num_vectors: int, dim: int, out: Floats | None = None
) -> Floats:
    """Sample the sets of one chunk; they depend only on the first four arguments.

    Each feature of a set has a distribution of its own, shared by the set's vectors:

    - normal with mean U(-3, 3) and standard deviation U(1, 3);
    - exponential with scale U(0.1, 2) and a random sign, shifted by U(0, 3) in the
      opposite direction;
    - uniform on an interval that begins at U(-3, 3) and has the length U(0.2, 3).

    Each kind has a third of the features, in an order sampled for each set. Vectors are
    divided by √d.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), C.1. Its exponential's λ, called
    a rate there, is the scale, as in numpy and the published code. The paper does not
    specify a d that three does not divide: then the kinds with an additional feature
    are sampled for each set, so 16 features are 6, 5 and 5 in any order.

    Returns:
        ``(CHUNK, N, d)``, which is ``out`` if it is given.
    """
    # Choose one of three distributions for each feature of each set.
    generator = _generator(seed, SETS, chunk)
    kinds = np.arange(dim) + generator.integers(3, size=(CHUNK, 1))
    kinds = generator.permuted(kinds % 3, axis=1).ravel()
    # Sort features by kind to sample each kind at once; `place` inverts the order.
    place = np.empty_like(kinds)
    place[np.argsort(kinds, kind="stable")] = np.arange(len(kinds))
    ends = np.bincount(kinds, minlength=3).cumsum()[:-1]
    features, by_set = _scratch_arrays(len(kinds), num_vectors)
    parts = np.split(features, ends)
    generator.standard_normal(out=parts[NORMAL], dtype=np.float32)
    generator.standard_exponential(out=parts[EXPONENTIAL], dtype=np.float32)
    generator.random(out=parts[UNIFORM], dtype=np.float32)
    # Scale and shift each feature.
    location, scale = _parameters(generator, [len(part) for part in parts])
    features *= (scale / dim**0.5).astype(np.float32)[:, None]
    features += (location / dim**0.5).astype(np.float32)[:, None]
    # A mode other than "raise" writes into `by_set` without a copy.
    np.take(features, place, axis=0, out=by_set, mode="clip")
    # Return sets of vectors, in the given memory if there is some.
    if out is None:
        out = np.empty((CHUNK, num_vectors, dim), np.float32)
    out[:] = by_set.reshape(CHUNK, dim, num_vectors).transpose(0, 2, 1)
    return out


def _scratch_arrays(*shape: int) -> Floats:
    """Return two arrays kept between calls: new pages cost as much as the sampling."""
    if getattr(_scratch, "shape", None) != shape:
        _scratch.shape = shape
        _scratch.arrays = np.empty((2, *shape), np.float32)
    arrays: Floats = _scratch.arrays
    return arrays


def _parameters(
    generator: np.random.Generator, counts: list[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sample locations and scales of ``counts`` features of each kind."""
    normal, exponential, uniform = counts
    # An exponential feature is mirrored at random.
    sign = generator.choice([-1.0, 1.0], exponential)
    locations = (
        generator.uniform(-3, 3, normal),
        -sign * generator.uniform(0, 3, exponential),
        generator.uniform(-3, 3, uniform),
    )
    scales = (
        generator.uniform(1, 3, normal),
        sign * generator.uniform(0.1, 2, exponential),
        generator.uniform(0.2, 3, uniform),
    )
    return np.concatenate(locations), np.concatenate(scales)


def sample_choices(seed: int, num_samples: int, num_vectors: int) -> Integers:
    """Sample the target point of each set, an index ``(num_samples,)``.

    The first values do not depend on ``num_samples``.
    """
    return _generator(seed, CHOICES).integers(num_vectors, size=num_samples)


def nearest_means(sets: Floats, chosen: Integers, k: int) -> Floats:
    """Compute the mean of the k vectors nearest to the target point, ``(B, d)``.

    Distances are Euclidean. The target point is not a neighbour of itself, so a set has
    N - 1 neighbours, and k = N gives the mean of those.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), section 4.2 and C.2.

    Args:
        sets: ``(B, N, d)`` with N at least 2.
        chosen: ``(B,)``, index of each set's target point.
        k: number of neighbours, in [1, N].
    """
    batch, count, _ = sets.shape
    own = np.arange(batch), chosen
    # The target point itself is infinitely far.
    apart = sets - sets[own][:, None]
    distances = np.einsum("bnd,bnd->bn", apart, apart)
    distances[own] = np.inf
    k = min(k, count - 1)
    nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
    # Sum the neighbours by a product with weights 1/k.
    weights = np.zeros_like(distances)
    np.put_along_axis(weights, nearest, np.float32(1 / k), axis=1)
    return (weights[:, None] @ sets)[:, 0]


def targets(sets: Floats, chosen: Integers, target: Target, k: int) -> Floats:
    """Compute the target of each set, ``(B, d)``.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), section 4.2, and B.3 for each
    feature's minimum, maximum and mean over all N vectors.

    ``chosen`` and ``k`` are for "nearest" only; see `nearest_means`.
    """
    if target == "nearest":
        return nearest_means(sets, chosen, k)
    aggregated: Floats = getattr(sets, target)(axis=1)
    return aggregated


def _generator(seed: int, *stream: int) -> np.random.Generator:
    sequence = np.random.SeedSequence(seed, spawn_key=stream)
    return np.random.Generator(np.random.SFC64(sequence))
