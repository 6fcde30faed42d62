"""Fetch a public file, and trust it only if its checksum is right."""

import hashlib
import shutil
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from marl_pool.utils.atomic import make_folder, new_binary_file
from marl_pool.utils.errors import InputError

TIMEOUT = 60
"""Seconds without an answer after which a download fails."""


class Source(NamedTuple):
    """A public file.

    Attributes:
        url: where it is.
        md5: its checksum, hexadecimal: published as such, against damage and not
            against an attacker.
    """

    url: str
    md5: str

    @property
    def name(self) -> str:
        """File name, from the URL."""
        return self.url.rpartition("/")[2]


def fetch(source: Source, folder: Path) -> Path:
    """Download a file.

    Args:
        source: what to fetch.
        folder: for it; made if there is none.

    Raises:
        InputError: it cannot be fetched or written, or its checksum is wrong; then
            nothing stays.
    """
    file = folder / source.name
    try:
        make_folder(folder)
        with (
            urllib.request.urlopen(source.url, timeout=TIMEOUT) as answer,
            new_binary_file(file) as out,
        ):
            shutil.copyfileobj(answer, out)
            out.flush()
            found = md5(Path(out.name))
            if found != source.md5:
                raise InputError(
                    f"{source.url}: expected the MD5 checksum {source.md5}, got {found}"
                )
    except (OSError, HTTPException) as error:
        raise InputError(f"{source.url} cannot be fetched: {error}") from error
    return file


def md5(file: Path) -> str:
    """The MD5 checksum of a file, hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "md5").hexdigest()
