"""CIFAR-10 and CIFAR-100 in their published binary archives."""

import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marl_pool.training.supervised.images.download import md5
from marl_pool.utils.errors import InputError

SIDE, CHANNELS = 32, 3


class Archive(NamedTuple):
    """Layout of an archive: its files, and the bytes of labels before each image."""

    train: tuple[str, ...]
    test: str
    label_bytes: int
    num_classes: int


ARCHIVES = {
    "cifar10": Archive(
        tuple(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)),
        "cifar-10-batches-bin/test_batch.bin",
        1,
        10,
    ),
    # The label of one of 20 groups of classes precedes that of the class.
    "cifar100": Archive(
        ("cifar-100-binary/train.bin",), "cifar-100-binary/test.bin", 2, 100
    ),
}


def read_cifar(file: Path, kind: str, checksum: str) -> tuple[np.ndarray, ...]:
    """Read an archive after the verification of its checksum.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html describes the format: an image
    is its labels and then its red, green and blue plane, each row by row.

    Args:
        file: path of the ``.tar.gz``.
        kind: key of `ARCHIVES`.
        checksum: MD5 checksum of the published archive, hexadecimal.

    Returns:
        Training images ``(n, 32, 32, 3)`` uint8 and their labels ``(n,)`` uint8, then
        test images and labels.

    Raises:
        InputError: another checksum, or a file that cannot be read.
    """
    archive = ARCHIVES[kind]
    try:
        if (found := md5(file)) != checksum:
            raise InputError(
                f"{file}: expected the published archive with MD5 checksum {checksum}, "
                f"got {found}"
            )
        # Only the published bytes get here, so nothing else has to be validated.
        with tarfile.open(file) as opened:
            return (
                *_read(opened, archive.train, archive.label_bytes),
                *_read(opened, (archive.test,), archive.label_bytes),
            )
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error}") from error


def _read(
    opened: tarfile.TarFile, names: tuple[str, ...], label_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    members = filter(None, map(opened.extractfile, names))
    content = b"".join(member.read() for member in members)
    records = np.frombuffer(content, np.uint8)
    records = records.reshape(-1, label_bytes + CHANNELS * SIDE * SIDE)
    planes = records[:, label_bytes:].reshape(-1, CHANNELS, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), records[:, label_bytes - 1]
