"""IDX files, the format of MNIST and similar data sets."""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from marl_pool.utils.errors import InputError
from marl_pool.utils.reading import ARRAY_BYTES

UNSIGNED_BYTE = 8
"""Code of the only supported element type in the header."""


def read_idx(file: Path) -> np.ndarray:
    """Read an array of bytes, gzip-compressed if the name ends in ``.gz``, as uint8.

    The format: two zero bytes, the type of the elements, the number of dimensions, each
    dimension's size as a big-endian 32-bit integer, then the elements.

    Raises:
        InputError: another format, or a truncated or corrupt file.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            return _read(file, opened)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} is truncated or corrupt: {error}") from error


def _read(file: Path, opened: Any) -> np.ndarray:
    # The header has a magic number, a data type and the sizes of the dimensions.
    first = opened.read(4)
    header = opened.read(4 * first[3]) if len(first) == 4 else b""
    if first[:3] != bytes([0, 0, UNSIGNED_BYTE]) or len(header) < 4 * first[3]:
        raise InputError(f"{file}: expected an IDX file of bytes, got another header")
    shape = tuple(np.frombuffer(header, ">u4").tolist())
    # Refuse to allocate what a forged header asks for.
    if prod(shape) > ARRAY_BYTES:
        raise InputError(
            f"{file}: expected at most {ARRAY_BYTES:,} bytes, got a header with "
            f"{prod(shape):,}"
        )
    # Read a byte more than there should be, to notice a longer file.
    content = opened.read(prod(shape) + 1)
    if len(content) != prod(shape):
        found = "more" if len(content) > prod(shape) else f"{len(content):,}"
        raise InputError(
            f"{file} is truncated or corrupt: expected {prod(shape):,} bytes after its "
            f"header, got {found}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)
