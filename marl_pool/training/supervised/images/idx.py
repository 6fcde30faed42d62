"""The IDX format of MNIST and its kin."""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from marl_pool.utils.errors import InputError
from marl_pool.utils.reading import ARRAY_BYTES

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
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            return _read(file, opened)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} is truncated or corrupt: {error}") from error


def _read(file: Path, opened: Any) -> np.ndarray:
    first = opened.read(4)
    header = opened.read(4 * first[3]) if len(first) == 4 else b""
    if first[:3] != bytes([0, 0, UNSIGNED_BYTE]) or len(header) < 4 * first[3]:
        raise InputError(f"{file}: expected an IDX file of bytes, got another header")
    shape = tuple(np.frombuffer(header, ">u4").tolist())
    if prod(shape) > ARRAY_BYTES:
        raise InputError(
            f"{file}: expected at most {ARRAY_BYTES:,} bytes, its header says "
            f"{prod(shape):,}"
        )
    content = opened.read(prod(shape) + 1)
    if len(content) != prod(shape):
        found = "more" if len(content) > prod(shape) else f"{len(content):,}"
        raise InputError(
            f"{file} is truncated or corrupt: expected {prod(shape):,} bytes after its "
            f"header, got {found}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)
