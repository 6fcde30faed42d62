"""Files of image data sets: verified downloads, IDX files, and CIFAR's archives.

CIFAR-10 and CIFAR-100 are read from their public "binary" archives, whose files are
records of labels and pixels, a byte each.
"""

import gzip
import hashlib
import shutil
import tarfile
import urllib.request
import zlib
from http.client import HTTPException
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from marl_pool.files.atomic import make_folder, new_binary_file
from marl_pool.files.reading import ARRAY_BYTES, Bounded
from marl_pool.utils.errors import InputError, one_line


class Source(NamedTuple):
    """A public file."""

    url: str
    md5: str
    """Published MD5 checksum, hexadecimal; it detects damage, not an attack."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


def fetch(source: Source, folder: Path) -> Path:
    """Download a file to a folder, made if it is missing.

    Raises:
        InputError: a failed download, or a wrong checksum; no file is left.
    """
    file = folder / source.name
    try:
        make_folder(folder)
        with (
            urllib.request.urlopen(source.url, timeout=60) as answer,
            new_binary_file(file) as out,
        ):
            shutil.copyfileobj(answer, out)
            out.flush()
            # Verify the checksum before the file gets its name.
            with open(out.name, "rb") as content:
                checksum = hashlib.file_digest(content, "md5").hexdigest()
            if checksum != source.md5:
                raise InputError(
                    f"{source.url}: expected the MD5 checksum {source.md5}, got "
                    f"{checksum}"
                )
    except (OSError, HTTPException) as error:
        raise InputError(f"{source.url} cannot be downloaded: {error}") from error
    return file


def read_idx(file: Path) -> np.ndarray:
    """Read an array of bytes, gzip-compressed if the name ends in ``.gz``, as uint8.

    The format: two zero bytes, the type of the elements, the number of dimensions, each
    dimension's size as a big-endian 32-bit integer, then the elements.

    Raises:
        InputError: another format, or a truncated or corrupt file.
    """
    try:
        with _open(file) as opened:
            # Type 8 means unsigned bytes.
            first = opened.read(4)
            header = opened.read(4 * first[3]) if len(first) == 4 else b""
            if first[:3] != bytes([0, 0, 8]) or len(header) < 4 * first[3]:
                raise InputError(
                    f"{file}: expected an IDX file of bytes, got another header"
                )
            shape = tuple(np.frombuffer(header, ">u4").tolist())
            # Refuse to allocate what a forged header asks for.
            if prod(shape) > ARRAY_BYTES:
                raise InputError(
                    f"{file}: expected at most {ARRAY_BYTES:,} bytes, got a header "
                    f"with {prod(shape):,}"
                )
            # Read one byte more than expected, to detect a longer file.
            content = opened.read(prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} is truncated or corrupt: {error}") from error
    if len(content) != prod(shape):
        length = "more" if len(content) > prod(shape) else f"{len(content):,}"
        raise InputError(
            f"{file} is truncated or corrupt: expected {prod(shape):,} bytes after its "
            f"header, got {length}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


class Archive(NamedTuple):
    """Layout of an archive: its folder, names of files, and size of labels."""

    folder: str
    train: tuple[str, ...]
    test: str
    label_bytes: int
    """Label bytes of a record; the last one is the class."""
    num_classes: int


ARCHIVES = {
    "cifar10": Archive(
        "cifar-10-batches-bin",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
        1,
        10,
    ),
    "cifar100": Archive("cifar-100-binary", ("train.bin",), "test.bin", 2, 100),
}


def read_cifar(file: Path, kind: str) -> tuple[np.ndarray, ...]:
    """Read an archive.

    Args:
        file: path of the archive, gzip-compressed if the name ends in ``.gz``.
        kind: key of `ARCHIVES`.

    Returns:
        Training images ``(n, 32, 32, 3)`` uint8 and their labels ``(n,)`` uint8, then
        test images and labels.

    Raises:
        InputError: a truncated or corrupt archive, or one of another format.
    """
    archive = ARCHIVES[kind]
    try:
        with (
            _open(file) as unpacked,
            tarfile.open(fileobj=Bounded(unpacked, ARRAY_BYTES), mode="r:") as opened,  # type: ignore[call-overload]
        ):
            train = [_read_batch(opened, archive, name) for name in archive.train]
            test = _read_batch(opened, archive, archive.test)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{file} is truncated or corrupt: {one_line(error)}"
        ) from error
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    images, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return images, labels, *test


def _open(file: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _read_batch(
    opened: tarfile.TarFile, archive: Archive, name: str
) -> tuple[np.ndarray, np.ndarray]:
    path = f"{archive.folder}/{name}"
    try:
        member = opened.extractfile(path)
    except KeyError as error:
        raise InputError(f"expected an archive with {path}, got none") from error
    if member is None:
        raise InputError(f"expected a file {path}, got a folder")
    # Each record is the labels, then three planes of pixels, each in rows.
    size, content = archive.label_bytes + 3 * 32 * 32, member.read()
    if not content or len(content) % size:
        raise InputError(
            f"{path}: expected records of {size} bytes, got {len(content):,} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels, pixels = np.split(records, [archive.label_bytes], axis=1)
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels[:, -1]
