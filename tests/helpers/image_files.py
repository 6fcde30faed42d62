"""Image data sets as they are published, written by hand and small."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from marl_pool.training.supervised.images.cifar import ARCHIVES
from marl_pool.training.supervised.images.download import Source, md5
from marl_pool.training.supervised.images.images import SOURCES


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format, written by hand."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, train: int = 40, test: int = 10) -> Path:
    """Four compressed IDX files of random images."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (count, 28, 28))
        for kind, array in (
            ("images-idx3", images),
            ("labels-idx1", random.integers(0, 10, count)),
        ):
            file = folder / f"{prefix}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(idx(array)))
    return folder


def write_cifar(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive like the published one, with three images in each file.

    Its checksum takes the place of the published one.
    """
    random = np.random.default_rng(1)
    layout, (source,) = ARCHIVES[kind], SOURCES[kind]
    file = folder / source.name
    with tarfile.open(file, "w:gz") as archive:
        for name in (*layout.train, layout.test):
            records = random.integers(
                0, 256, (3, layout.label_bytes + 3072), dtype=np.uint8
            )
            records[:, layout.label_bytes - 1] = (0, layout.num_classes - 1, 1)
            member = tarfile.TarInfo(name)
            member.size = records.size
            archive.addfile(member, io.BytesIO(records.tobytes()))
    monkeypatch.setitem(SOURCES, kind, (Source(source.url, md5(file)),))
    return file
