"""Storage of the KNN-centroid task's sets: in memory, or in a file if large."""

import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from marl_pool.studies.adapool import knn_data
from marl_pool.utils.atomic import (
    discard_leftovers,
    locked,
    make_folder,
    new_binary_file,
)
from marl_pool.utils.errors import InputError

IN_MEMORY = 1 << 28
"""Maximum bytes of sets in memory; more go to a file."""


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
                self._sets[number * knn_data.CHUNK :][: len(chunk)] = chunk
            return
        shape = f"{num_samples}x{num_vectors}x{dim}"
        self.file = folder / f"knn_centroid_v{knn_data.VERSION}_{shape}_seed{seed}.npy"
        if not self.file.exists():
            self._make(self.file)
        self._open(self.file)

    def __getitem__(self, rows: knn_data.Integers) -> knn_data.Floats:
        """Return the sets of the given numbers, ``(B, N, d)``."""
        if self.file is None:
            return self._sets[rows]
        # Open the file each time: the pages of an open memory map count as memory of
        # the process, in the end the whole file.
        return self._open(self.file)[rows]

    def _open(self, file: Path) -> knn_data.Floats:
        try:
            opened: knn_data.Floats = np.load(file, mmap_mode="r")
        except (ValueError, OSError) as error:
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
                if not file.exists():
                    self._write(file)
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from error

    def _write(self, file: Path) -> None:
        needed, free = 4 * np.prod(self._shape), shutil.disk_usage(file.parent).free
        if needed > free:
            raise InputError(
                f"{file.parent}: expected {needed / 1e9:.1f} GB of space for the sets, "
                f"got {free / 1e9:.1f} GB"
            )
        with new_binary_file(file) as out:
            header = {"descr": "<f4", "fortran_order": False, "shape": self._shape}
            np.lib.format.write_array_header_1_0(out, header)
            for chunk in self._chunks():
                out.write(chunk.data)

    def _chunks(self) -> Iterator[knn_data.Floats]:
        """Yield all sets in order; the next chunk may overwrite the last one's memory.

        Threads sample some chunks ahead, because numpy releases the interpreter lock.
        """
        # Sample a few chunks ahead in threads, into a ring of buffers.
        count, *shape = self._shape
        total = -(-count // knn_data.CHUNK)
        workers = min(os.cpu_count() or 1, 8)
        ring = np.empty((min(2 * workers, total), knn_data.CHUNK, *shape), np.float32)

        def sample(number: int) -> knn_data.Floats:
            out = ring[number % len(ring)]
            return knn_data.sample_sets(self._seed, number, shape[0], shape[1], out)

        with ThreadPoolExecutor(workers) as pool:
            # Refill a buffer only after its chunk was consumed.
            pending = deque(pool.submit(sample, number) for number in range(len(ring)))
            for number in range(total):
                yield pending.popleft().result()[: count - number * knn_data.CHUNK]
                if number + len(ring) < total:
                    pending.append(pool.submit(sample, number + len(ring)))
