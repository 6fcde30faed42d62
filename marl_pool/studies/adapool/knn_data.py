"""Sets of vectors of random distributions, and the means of nearest neighbours."""

import threading
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown

Target = Literal["nearest", "min", "max", "mean"]
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

CHUNK = 256
"""Sets drawn together, from a generator of their own."""
NORMAL, EXPONENTIAL, UNIFORM = range(3)
VERSION = 1
"""Of what a seed stands for: files of sets made by another one are not used."""
SETS, CHOICES = range(2)
"""What a stream of numbers is for."""
_scratch = threading.local()


def draw_sets(
    seed: int, chunk: int, num_vectors: int, dim: int, out: Floats | None = None
) -> Floats:
    """Draw the sets of one chunk; they depend on the first four arguments alone.

    Each feature of a set has a distribution of its own, from which all vectors of the
    set draw: normal with mean U(-3, 3) and deviation U(1, 3); exponential with scale
    U(0.1, 2), its sign ±1 and shifted against it by U(0, 3); or uniform from U(-3, 3)
    on over a length of U(0.2, 3). A third of the features has each kind, in an order
    drawn for each set. Vectors are divided by √d.

    Source: the AdaPool paper, C.1. Its exponential's λ, there called a rate, is the
    scale, as in numpy and the published code. Where the paper says nothing: if three
    does not divide d, the kinds that have a feature more are drawn for each set, so
    16 are 6, 5 and 5 in any order.

    Args:
        seed: of all sets, at least 0.
        chunk: number of the chunk, from 0.
        num_vectors: N.
        dim: d.
        out: where they are written; None: memory of their own.

    Returns:
        ``(CHUNK, N, d)``.
    """
    generator = _generator(seed, SETS, chunk)
    kinds = np.arange(dim) + generator.integers(3, size=(CHUNK, 1))
    kinds = generator.permuted(kinds % 3, axis=1).ravel()
    # Sorted by kind each is drawn at once; `place` says where a feature lies then.
    place = np.empty_like(kinds)
    place[np.argsort(kinds, kind="stable")] = np.arange(len(kinds))
    ends = np.bincount(kinds, minlength=3).cumsum()[:-1]
    features, by_set = _room(len(kinds), num_vectors)
    parts = np.split(features, ends)
    generator.standard_normal(out=parts[NORMAL], dtype=np.float32)
    generator.standard_exponential(out=parts[EXPONENTIAL], dtype=np.float32)
    generator.random(out=parts[UNIFORM], dtype=np.float32)
    location, scale = _parameters(generator, [len(part) for part in parts])
    features *= (scale / dim**0.5).astype(np.float32)[:, None]
    features += (location / dim**0.5).astype(np.float32)[:, None]
    # With a mode other than "raise" it writes into `by_set` itself.
    np.take(features, place, axis=0, out=by_set, mode="clip")
    if out is None:
        out = np.empty((CHUNK, num_vectors, dim), np.float32)
    out[:] = by_set.reshape(CHUNK, dim, num_vectors).transpose(0, 2, 1)
    return out


def _room(*shape: int) -> tuple[Floats, Floats]:
    """Memory kept between calls: fresh pages cost as much as the random numbers."""
    if getattr(_scratch, "shape", None) != shape:
        _scratch.shape = shape
        _scratch.rooms = np.empty((2, *shape), np.float32)
    return _scratch.rooms[0], _scratch.rooms[1]


def _parameters(
    generator: np.random.Generator, counts: list[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw where and how wide ``counts`` features of each kind are."""
    normal, exponential, uniform = counts
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


def draw_choices(seed: int, num_samples: int, num_vectors: int) -> Integers:
    """Draw which vector of each set is the target point, ``(num_samples,)``.

    The first ones are the same however many there are.
    """
    return _generator(seed, CHOICES).integers(num_vectors, size=num_samples)


def nearest_means(sets: Floats, chosen: Integers, k: int) -> Floats:
    """Return the mean of the k vectors nearest to the target point.

    Neighbours are those by Euclidean distance, the target point itself not among
    them. So a set has N - 1, and with k = N the mean is that of N - 1 vectors.

    Source: the AdaPool paper, section 4.2 and C.2.

    Args:
        sets: ``(B, N, d)``.
        chosen: ``(B,)``, the target point of each set.
        k: in [1, N], and N at least 2.

    Returns:
        ``(B, d)``.

    """
    batch, count, _ = sets.shape
    own = np.arange(batch), chosen
    apart = sets - sets[own][:, None]
    distances = np.einsum("bnd,bnd->bn", apart, apart)
    distances[own] = np.inf
    k = min(k, count - 1)
    nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
    weights = np.zeros_like(distances)
    np.put_along_axis(weights, nearest, np.float32(1 / k), axis=1)
    return (weights[:, None] @ sets)[:, 0]


def targets(sets: Floats, chosen: Integers, target: Target, k: int) -> Floats:
    """Return what is to be predicted of each set, ``(B, d)``.

    Source: the AdaPool paper, section 4.2, and B.3 for the features' smallest,
    largest and mean value over all N vectors.

    Args:
        sets: ``(B, N, d)``.
        chosen: ``(B,)``, the target point of each set, for "nearest" only.
        target: the mean of the nearest neighbours, or how vectors are aggregated.
        k: neighbours, for "nearest" only.
    """
    if target == "nearest":
        return nearest_means(sets, chosen, k)
    aggregated: Floats = getattr(sets, target)(axis=1)
    return aggregated


def check_target(target: Target, k: int, num_vectors: int) -> None:
    """Refuse a target that there is not, or one that a set of N vectors has not.

    Raises:
        InputError: an unknown target, fewer than two vectors, or k not in [1, N].
    """
    if target not in get_args(Target):
        raise unknown("task.target", target, get_args(Target))
    if num_vectors < 2:
        raise InputError(f"task.num_vectors: expected at least 2, got {num_vectors}")
    if target == "nearest" and not 1 <= k <= num_vectors:
        raise InputError(
            f"task.k: expected an integer in [1, task.num_vectors = {num_vectors}], "
            f"got {k}"
        )


def _generator(seed: int, *stream: int) -> np.random.Generator:
    sequence = np.random.SeedSequence(seed, spawn_key=stream)
    return np.random.Generator(np.random.SFC64(sequence))
