"""Small image data sets in the file formats of the published ones."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np

from marl_pool_studies.image_files import ARCHIVES


def idx(array: np.ndarray) -> bytes:
    """Encode an array of bytes in the IDX format."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, train: int = 40, test: int = 10) -> Path:
    """Write four compressed IDX files of random images and labels."""
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


def write_cifar(file: Path, kind: str, contents: dict[str, bytes]) -> Path:
    """Write an archive with the layout of the published one."""
    with tarfile.open(file, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{ARCHIVES[kind].folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def cifar_contents(kind: str) -> dict[str, bytes]:
    """Return the files of an archive, three records in each."""
    random = np.random.default_rng(1)
    archive = ARCHIVES[kind]
    contents = {}
    for name in (*archive.train, archive.test):
        records = random.integers(0, 256, (3, archive.label_bytes + 3072), np.uint8)
        records[:, archive.label_bytes - 1] = [0, archive.num_classes - 1, 1]
        contents[name] = records.tobytes()
    return contents
