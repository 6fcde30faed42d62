"""Image data sets as they are published, written by hand and small."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

from marl_pool_studies.image_files import ARCHIVES


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


def python2_pickle(content: object) -> bytes:
    """Pickle as Python 2 and its NumPy did, written by hand: protocol 2, byte strings.

    Python 3 pickles bytes and arrays in other ways, also with protocol 2.
    """
    return b"\x80\x02" + python2(content) + b"."


def python2(content: object) -> bytes:
    if isinstance(content, bytes):
        if len(content) < 256:
            return b"U" + bytes([len(content)]) + content
        return b"T" + struct.pack("<i", len(content)) + content
    if isinstance(content, int):
        return b"M" + struct.pack("<H", content)
    if isinstance(content, list):
        return b"](" + b"".join(map(python2, content)) + b"e"
    if isinstance(content, dict):
        parts = [python2(key) + python2(value) for key, value in content.items()]
        return b"}(" + b"".join(parts) + b"u"
    assert isinstance(content, np.ndarray)
    assert content.dtype == np.uint8
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNN"
    kind += 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    shape = b"(" + b"".join(map(python2, content.shape)) + b"t"
    state = b"(K\x01" + shape + kind + b"\x89" + python2(content.tobytes()) + b"t"
    return empty + b"U\x01btR" + state + b"b"


def write_cifar(file: Path, kind: str, contents: dict[str, object]) -> Path:
    """An archive like the public one."""
    with tarfile.open(file, "w:gz") as archive:
        for name, content in contents.items():
            data = content if isinstance(content, bytes) else python2_pickle(content)
            member = tarfile.TarInfo(f"{ARCHIVES[kind].folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file


def cifar_contents(kind: str) -> dict[str, object]:
    """Return the contents of an archive, three images in each file."""
    random = np.random.default_rng(1)
    archive = ARCHIVES[kind]
    return {
        name: {
            b"data": random.integers(0, 256, (3, 3072), np.uint8),
            archive.labels: [0, archive.num_classes - 1, 1],
            b"filenames": [b"a.png", b"b.png", b"c.png"],
        }
        for name in (*archive.train, archive.test)
    }
