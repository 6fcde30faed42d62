"""CIFAR-10 and CIFAR-100 in their public "Python" archives.

The archives hold pickles. A pickle can run code, so ours reads nothing but what these
files consist of: arrays of bytes, and plain data.
"""

import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_pool.errors import InputError

SIDE, CHANNELS = 32, 3
ALLOWED = {
    (module, name)
    for module, names in {
        "numpy": ("ndarray", "dtype"),
        "numpy.core.multiarray": ("_reconstruct",),
        "numpy._core.multiarray": ("_reconstruct",),
        "_codecs": ("encode",),
    }.items()
    for name in names
}
"""What an array of bytes is pickled with, by versions of NumPy old and new."""


class Archive(NamedTuple):
    """Where an archive keeps what.

    Attributes:
        folder: inside the archive.
        train: names of the files to train on.
        test: name of the file to test on.
        labels: the key of the labels.
        num_classes: how many there are.
    """

    folder: str
    train: tuple[str, ...]
    test: str
    labels: bytes
    num_classes: int


ARCHIVES = {
    "cifar10": Archive(
        "cifar-10-batches-py",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test_batch",
        b"labels",
        10,
    ),
    "cifar100": Archive("cifar-100-python", ("train",), "test", b"fine_labels", 100),
}


def read_cifar(file: Path, kind: str) -> tuple[np.ndarray, ...]:
    """Read an archive.

    Args:
        file: the ``.tar.gz``.
        kind: a key of `ARCHIVES`.

    Returns:
        Images to train on, ``(n, 32, 32, 3)`` uint8, their labels ``(n,)`` uint8, and
        the same of the test set.

    Raises:
        InputError: a truncated or corrupt archive, or another one.
    """
    archive = ARCHIVES[kind]
    try:
        with tarfile.open(file) as opened:
            train = [_read(opened, archive, name) for name in archive.train]
            test = _read(opened, archive, archive.test)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())  # tarfile's may have several lines
        raise InputError(f"{file} is truncated or corrupt: {reason}") from error
    except _DamagedError as error:
        raise InputError(f"{file}: {error}") from error
    images, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return images, labels, *test


class _DamagedError(Exception):
    """What is wrong inside an archive."""


class _BytesUnpickler(pickle.Unpickler):
    """Reads arrays of bytes and plain data, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise _DamagedError(
                f"refused: it holds {module}.{name}, which a CIFAR archive has no use "
                "for"
            )
        return super().find_class(module, name)


def _read(
    opened: tarfile.TarFile, archive: Archive, name: str
) -> tuple[np.ndarray, np.ndarray]:
    path = f"{archive.folder}/{name}"
    try:
        member = opened.extractfile(path)
    except KeyError as error:
        raise _DamagedError(f"expected an archive with {path}, got none") from error
    if member is None:
        raise _DamagedError(f"expected a file {path}, got a folder")
    content = _unpickled(path, member.read())
    try:
        rows = np.asarray(content[b"data"], np.uint8)
        labels = np.asarray(content[archive.labels], np.uint8)
        planes = rows.reshape(len(labels), CHANNELS, SIDE, SIDE)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _DamagedError(f"{path} is none of CIFAR's files: {error!r}") from error
    return planes.transpose(0, 2, 3, 1), labels


def _unpickled(path: str, content: bytes) -> Any:
    try:
        return _BytesUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _DamagedError:
        raise
    except Exception as error:
        # Whatever damaged bytes make of the unpickler, the file is to blame.
        raise _DamagedError(f"{path} is damaged: {error!r}") from error
