"""The IDX format of MNIST and its kin."""

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np

from marl_pool.errors import InputError

UNSIGNED_BYTE = 8
"""The only type of element that these data sets have, by its code in the header."""


def read_idx(file: Path) -> np.ndarray:
    """Read a file of bytes, gzip-compressed if its name ends in ``.gz``.

    The format: two zero bytes, the type of the elements, the number of dimensions, each
    dimension's size as four bytes, most significant first, then the elements.

    Returns:
        The array, uint8.

    Raises:
        InputError: the file is no such file, truncated or corrupt.
    """
    content = _content(file)
    dimensions = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dimensions
    if content[:3] != bytes([0, 0, UNSIGNED_BYTE]) or len(content) < header:
        raise InputError(f"{file}: expected an IDX file of bytes, got another header")
    shape = tuple(np.frombuffer(content, ">u4", dimensions, 4).tolist())
    found = len(content) - header
    if found != prod(shape):
        raise InputError(
            f"{file} is truncated or corrupt: expected {prod(shape):,} bytes after its "
            f"header, got {found:,}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(file: Path) -> bytes:
    try:
        raw = file.read_bytes()
        return gzip.decompress(raw) if file.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} is truncated or corrupt: {error}") from error
