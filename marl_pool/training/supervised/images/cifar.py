"""CIFAR-10 and CIFAR-100 in their public "Python" archives.

The archives hold pickles. Loading a pickle can run code, and NumPy's own functions that
restore an array trust their arguments. So each name in a pickle is replaced by a
function of this module that accepts only bytes and a shape.
"""

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marl_pool.utils.errors import InputError
from marl_pool.utils.reading import ARRAY_BYTES, Bounded

SIDE, CHANNELS = 32, 3


class Archive(NamedTuple):
    """Layout of an archive.

    Attributes:
        folder: folder inside the archive.
        train: names of the training files.
        test: name of the test file.
        labels: key of the labels.
        num_classes: number of classes.
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
        file: path of the ``.tar.gz``.
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
            gzip.open(file) as unpacked,
            tarfile.open(fileobj=Bounded(unpacked, ARRAY_BYTES), mode="r:") as opened,  # type: ignore[call-overload]
        ):
            train = [_read(opened, archive, name) for name in archive.train]
            test = _read(opened, archive, archive.test)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        # Join the lines: tarfile's messages may have several.
        reason = " ".join(str(error).split())
        raise InputError(f"{file} is truncated or corrupt: {reason}") from error
    except (_DamagedError, InputError) as error:
        raise InputError(f"{file}: {error}") from error
    images, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return images, labels, *test


class _DamagedError(Exception):
    """Invalid content of an archive."""


class _Array:
    """Stand-in for a pickled array, restored from its pickled state."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, kind, in_columns, raw = state
        self.array = _bytes(raw, kind, shape, "F" if in_columns else "C")


class _Byte:
    """Stand-in for the dtype of bytes, the only one accepted."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        _version, order, *rest = state
        if order not in ("|", b"|") or rest[:6] != [None, None, None, -1, -1, 0]:
            raise _DamagedError("refused: an array of another type than bytes")


def _bytes(raw: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    """Build an array from validated bytes, element type, shape and memory order."""
    if type(kind) is not _Byte or type(raw) not in (bytes, bytearray):
        raise _DamagedError("refused: an array of another type than bytes")
    if not isinstance(shape, tuple) or not all(
        type(size) is int and size >= 0 for size in shape
    ):
        raise _DamagedError(f"expected the shape of an array, got {shape!r:.80}")
    if len(raw) != prod(shape) or order not in ("C", "F"):
        raise _DamagedError(f"expected {prod(shape)} bytes, got {len(raw)}")
    return np.frombuffer(bytes(raw), np.uint8).reshape(shape, order=order)


def _reconstruct(*_: Any) -> _Array:
    """Replace NumPy's ``_reconstruct``: make an empty array, whose state follows."""
    return _Array()


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> _Array:
    """Replace NumPy's ``_frombuffer``, in use since pickle protocol 5."""
    made = _Array()
    made.array = _bytes(raw, kind, shape, order)
    return made


def _dtype(code: Any, *_: Any) -> _Byte:
    """Replace NumPy's ``dtype``: accept only the type of bytes."""
    if code not in ("u1", b"u1", "uint8", b"uint8", "|u1", b"|u1"):
        raise _DamagedError("refused: an array of another type than bytes")
    return _Byte()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Replace ``codecs.encode``, by which Python 3 pickles bytes for Python 2."""
    if type(text) is not str or encoding != "latin1":
        raise _DamagedError("refused: text in another encoding than latin1")
    return text.encode("latin1")


class _Name:
    """Name in a pickle that can be called but not modified."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _DamagedError("refused: it modifies the functions that build arrays")


NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _reconstruct,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    **{
        (f"numpy.{core}.{module}", name): stand_in
        for core in ("core", "_core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}
"""Replacements of the names in pickled arrays of bytes, of all versions of NumPy."""


class _BytesUnpickler(pickle._Unpickler):
    """Unpickler of arrays of bytes and plain data that rejects everything else.

    It extends the unpickler in Python, because the one in C allocates as much memory
    for its memo as a pickle requests.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise _DamagedError(
                f"refused: it holds {module}.{name}, which no CIFAR archive needs"
            )
        return _Name(NAMES[module, name])


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
        rows, given = content[b"data"].array, content[archive.labels]
        if not isinstance(given, list) or any(
            type(label) is not int for label in given
        ):
            raise _DamagedError(f"{path}: expected a list of integers as labels")
        labels = np.array(given, np.uint8)
        planes = rows.reshape(len(labels), CHANNELS, SIDE, SIDE)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise _DamagedError(f"{path} is none of CIFAR's files: {error!r}") from error
    return planes.transpose(0, 2, 3, 1), labels


def _unpickled(path: str, content: bytes) -> Any:
    try:
        return _BytesUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _DamagedError as error:
        raise _DamagedError(f"{path}: {error}") from error
    except Exception as error:
        # Damaged bytes can raise anything in the unpickler: blame the file.
        raise _DamagedError(f"{path} is damaged: {error!r}") from error
