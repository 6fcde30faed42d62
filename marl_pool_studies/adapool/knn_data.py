"""Random sets of vectors, their storage, and the means of nearest neighbors."""

import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from marl_pool.files.atomic import (
    discard_leftovers,
    locked,
    make_folder,
    new_binary_file,
)
from marl_pool.utils.errors import InputError

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
IN_MEMORY = 1 << 28
"""Maximum bytes of sets in memory; more go to a file."""
_scratch = threading.local()


def sample_sets(
    seed: int, chunk: int, num_vectors: int, dim: int, out: Floats | None = None
) -> Floats:
    """Sample the sets ``(CHUNK, N, d)`` of one chunk, into ``out`` if it is given.

    They depend only on the first four arguments. Each feature of a set has a
    separate distribution, shared by the set's vectors:

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
    """
    # Choose one of three distributions for each feature of each set.
    generator = _generator(seed, SETS, chunk)
    kinds = np.arange(dim) + generator.integers(3, size=(CHUNK, 1))
    kinds = generator.permuted(kinds % 3, axis=1).ravel()
    # Sort features by kind to sample each kind at once; `place` inverts the order.
    place = np.empty_like(kinds)
    place[np.argsort(kinds, kind="stable")] = np.arange(len(kinds))
    ends = np.bincount(kinds, minlength=3).cumsum()[:-1]
    # Keep two arrays between calls: allocating pages costs as much as the sampling.
    shape = len(kinds), num_vectors
    if getattr(_scratch, "shape", None) != shape:
        _scratch.shape, _scratch.arrays = shape, np.empty((2, *shape), np.float32)
    features, by_set = _scratch.arrays
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


def nearest_means(sets: Floats, target_indices: Integers, k: int) -> Floats:
    """Compute the mean of the k vectors nearest to the target point, ``(B, d)``.

    Distances are Euclidean. The target point is not a neighbor of itself, so a set has
    N - 1 neighbors, and k = N gives the mean of those.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), section 4.2 and C.2.

    Args:
        sets: ``(B, N, d)`` with N at least 2.
        target_indices: ``(B,)``, index of each set's target point.
        k: number of neighbors, in [1, N].
    """
    batch, count, _ = sets.shape
    at_target = np.arange(batch), target_indices
    # The target point itself is infinitely far.
    differences = sets - sets[at_target][:, None]
    distances = np.einsum("bnd,bnd->bn", differences, differences)
    distances[at_target] = np.inf
    k = min(k, count - 1)
    nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
    # Sum the neighbors by a product with weights 1/k.
    weights = np.zeros_like(distances)
    np.put_along_axis(weights, nearest, np.float32(1 / k), axis=1)
    return (weights[:, None] @ sets)[:, 0]


def targets(sets: Floats, target_indices: Integers, target: Target, k: int) -> Floats:
    """Compute the target of each set, ``(B, d)``.

    Source: AdaPool (https://arxiv.org/abs/2506.09215), section 4.2, and B.3 for each
    feature's minimum, maximum and mean over all N vectors.

    ``target_indices`` and ``k`` are for "nearest" only; see `nearest_means`.
    """
    if target == "nearest":
        return nearest_means(sets, target_indices, k)
    aggregated: Floats = getattr(sets, target)(axis=1)
    return aggregated


class Sets:
    """Sets of vectors by their numbers, equal for equal seeds.

    Large sets go to a file in ``folder``, which is made if it is missing. The file's
    name states all that its content depends on, so an existing file is used again. The
    first sets do not depend on ``num_samples``.

    Raises:
        InputError: an existing file with another content than its name states, or a
            file that cannot be written.
    """

    def __init__(
        self, folder: Path, *, num_samples: int, num_vectors: int, dim: int, seed: int
    ) -> None:
        self._shape = num_samples, num_vectors, dim
        self._seed = seed
        self.file: Path | None = None
        # Keep small data sets in memory, and large ones in a file.
        if 4 * num_samples * num_vectors * dim <= IN_MEMORY:
            self._sets = np.empty(self._shape, np.float32)
            for number, chunk in enumerate(self._chunks()):
                self._sets[number * CHUNK :][: len(chunk)] = chunk
            return
        shape = f"{num_samples}x{num_vectors}x{dim}"
        self.file = folder / f"knn_centroid_v{VERSION}_{shape}_seed{seed}.npy"
        if not self.file.exists():
            self._make(self.file)
        self._open(self.file)

    def __getitem__(self, rows: Integers) -> Floats:
        """Return the sets of the given numbers, ``(B, N, d)``."""
        if self.file is None:
            return self._sets[rows]
        # Open the file each time: the pages of an open memory map count as memory of
        # the process, in the end the whole file.
        return self._open(self.file)[rows]

    def _open(self, file: Path) -> Floats:
        try:
            opened: Floats = np.load(file, mmap_mode="r")
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"{file}: cannot be read ({error}); delete it") from error
        if opened.shape != self._shape or opened.dtype != np.float32:
            raise InputError(
                f"{file}: expected float32 of shape {self._shape}, "
                f"got {opened.dtype} of shape {opened.shape}; delete it"
            )
        return opened

    def _make(self, file: Path) -> None:
        """Write the file, or wait for another run that writes it."""
        try:
            make_folder(file.parent)
            with locked(file.with_name(f".{file.name}.lock"), refusal=None):
                # Delete the remains of a killed run, possibly many gigabytes.
                discard_leftovers(file.parent, of=file.name)
                if file.exists():
                    return
                num_bytes = 4 * np.prod(self._shape)
                num_free = shutil.disk_usage(file.parent).free
                if num_bytes > num_free:
                    raise InputError(
                        f"{file.parent}: expected {num_bytes / 1e9:.1f} GB of space "
                        f"for the sets, got {num_free / 1e9:.1f} GB"
                    )
                header = {"descr": "<f4", "fortran_order": False, "shape": self._shape}
                with new_binary_file(file) as out:
                    np.lib.format.write_array_header_1_0(out, header)
                    for chunk in self._chunks():
                        out.write(chunk.data)
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from error

    def _chunks(self) -> Iterator[Floats]:
        """Yield all sets in order; the next chunk may overwrite the last one's memory.

        Threads sample some chunks ahead into a ring of buffers, because numpy releases
        the interpreter lock.
        """
        count, *shape = self._shape
        total = -(-count // CHUNK)
        workers = min(os.cpu_count() or 1, 8)
        ring = np.empty((min(2 * workers, total), CHUNK, *shape), np.float32)

        def sample(number: int) -> Floats:
            out = ring[number % len(ring)]
            return sample_sets(self._seed, number, shape[0], shape[1], out)

        with ThreadPoolExecutor(workers) as pool:
            # Refill a buffer only after its chunk was consumed.
            pending = deque(pool.submit(sample, number) for number in range(len(ring)))
            for number in range(total):
                yield pending.popleft().result()[: count - number * CHUNK]
                if number + len(ring) < total:
                    pending.append(pool.submit(sample, number + len(ring)))


def _generator(seed: int, *stream: int) -> np.random.Generator:
    sequence = np.random.SeedSequence(seed, spawn_key=stream)
    return np.random.Generator(np.random.SFC64(sequence))
