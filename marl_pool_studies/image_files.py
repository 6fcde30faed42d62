"""Files of image data sets: verified downloads, IDX files, and CIFAR's archives.

CIFAR-10 and CIFAR-100 are read from their public "Python" archives, which hold pickles.
Loading a pickle can run code, and NumPy's own functions that restore an array trust
their arguments. So names in a pickle only record what they are called with, from which
this module restores arrays of bytes.
"""

import gzip
import hashlib
import io
import pickle
import shutil
import tarfile
import urllib.request
import zlib
from http.client import HTTPException
from math import prod
from pathlib import Path
from struct import unpack
from typing import Any, ClassVar, NamedTuple

import numpy as np

from marl_pool.files.atomic import make_folder, new_binary_file
from marl_pool.files.reading import ARRAY_BYTES, Bounded
from marl_pool.utils.errors import InputError


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
            # Verify the checksum before the file gets its name.
            shutil.copyfileobj(answer, out)
            out.flush()
            checksum = md5(Path(out.name))
            if checksum != source.md5:
                raise InputError(
                    f"{source.url}: expected the MD5 checksum {source.md5}, got "
                    f"{checksum}"
                )
    except (OSError, HTTPException) as error:
        raise InputError(f"{source.url} cannot be downloaded: {error}") from error
    return file


def md5(file: Path) -> str:
    """Compute the MD5 checksum of a file, hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "md5").hexdigest()


def read_idx(file: Path) -> np.ndarray:
    """Read an array of bytes, gzip-compressed if the name ends in ``.gz``, as uint8.

    The format: two zero bytes, the type of the elements, the number of dimensions, each
    dimension's size as a big-endian 32-bit integer, then the elements.

    Raises:
        InputError: another format, or a truncated or corrupt file.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
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
            # Read a byte more than there should be, to notice a longer file.
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
    """Layout of an archive: its folder, names of files, and key of the labels."""

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
            train = [_read_batch(opened, archive, name) for name in archive.train]
            test = _read_batch(opened, archive, archive.test)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        # Join the lines: tarfile's messages may have several.
        reason = " ".join(str(error).split())
        raise InputError(f"{file} is truncated or corrupt: {reason}") from error
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    # Join the training batches.
    images, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return images, labels, *test


class _Call:
    """Name in a pickle, or a call of it with the state that was set afterwards."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] | None = None) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> Any:
        # Python 3 pickles bytes for Python 2 as text, also the keys of a dictionary.
        if self.name == "encode":
            text, encoding = arguments
            if type(text) is not str or encoding != "latin1":
                raise InputError("refused: text in another encoding than latin1")
            return text.encode("latin1")
        return _Call(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        if self.arguments is None:
            raise InputError("refused: it modifies the functions that build arrays")
        if self.state is not None:
            raise ValueError("it sets a state twice")
        self.state = state

    def array(self) -> np.ndarray:
        """Restore an array of bytes from validated type, shape and memory order."""
        # numpy pickles an array in one of two forms.
        if self.name == "_frombuffer":
            raw, kind, shape, order = self.arguments or ()
        else:
            _version, shape, kind, in_columns, raw = self.state
            order = "F" if in_columns else "C"
        # Accept plain bytes alone, of the size that the shape states.
        if not _is_byte(kind) or type(raw) not in (bytes, bytearray):
            raise InputError("refused: an array of another type than bytes")
        if not isinstance(shape, tuple) or not all(
            type(size) is int and size >= 0 for size in shape
        ):
            raise InputError(f"expected the shape of an array, got {shape!r:.80}")
        if len(raw) != prod(shape) or order not in ("C", "F"):
            raise InputError(f"expected {prod(shape)} bytes, got {len(raw)}")
        return np.frombuffer(bytes(raw), np.uint8).reshape(shape, order=order)


def _is_byte(kind: Any) -> bool:
    """Return True for the record of ``numpy.dtype("u1")`` and the state of that."""
    if not isinstance(kind, _Call) or kind.name != "dtype":
        return False
    code, *_ = kind.arguments or (None,)
    _version, order, *layout = kind.state or (3, "|", None, None, None, -1, -1, 0)
    plain = order in ("|", b"|") and layout[:6] == [None, None, None, -1, -1, 0]
    return plain and code in ("u1", b"u1", "uint8", b"uint8", "|u1", b"|u1")


NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
"""Names in pickled arrays of bytes, of all versions of NumPy."""


class _BytesUnpickler(pickle._Unpickler):
    """Unpickler of arrays of bytes and plain data that rejects everything else.

    It extends the unpickler in Python, because the one in C allocates as much memory
    for its memo as a pickle requests.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise InputError(
                f"refused: it holds {module}.{name}, which no CIFAR archive needs"
            )
        return _Call(name)

    def load_bytearray8(self: Any) -> None:
        # Python's own allocates as much as the pickle claims.
        (size,) = unpack("<Q", self.read(8))
        if len(content := self.read(size)) < size:
            raise EOFError(f"expected {size:,} bytes, got {len(content):,}")
        self.append(bytearray(content))

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def _read_batch(
    opened: tarfile.TarFile, archive: Archive, name: str
) -> tuple[np.ndarray, np.ndarray]:
    # Find the file in the archive.
    path = f"{archive.folder}/{name}"
    try:
        member = opened.extractfile(path)
    except KeyError as error:
        raise InputError(f"expected an archive with {path}, got none") from error
    if member is None:
        raise InputError(f"expected a file {path}, got a folder")
    raw, problem = io.BytesIO(member.read()), "damaged"
    try:
        content = _BytesUnpickler(raw, encoding="bytes").load()
        problem = "none of CIFAR's files"
        rows, label_list = content[b"data"].array(), content[archive.labels]
        if not isinstance(label_list, list) or any(
            type(label) is not int for label in label_list
        ):
            raise InputError("expected a list of integers as labels")
        labels = np.array(label_list, np.uint8)
        planes = rows.reshape(len(labels), 3, 32, 32)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:
        # Damaged bytes can raise anything: blame the file.
        raise InputError(f"{path} is {problem}: {error!r}") from error
    return planes.transpose(0, 2, 3, 1), labels
