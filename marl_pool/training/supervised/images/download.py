"""Download of public files, verified by their checksums."""

import hashlib
import shutil
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from marl_pool.utils.atomic import make_folder, new_binary_file
from marl_pool.utils.errors import InputError

TIMEOUT = 60
"""Timeout of a download's connection, in seconds."""


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
            urllib.request.urlopen(source.url, timeout=TIMEOUT) as answer,
            new_binary_file(file) as out,
        ):
            # Verify the checksum before the file gets its name.
            shutil.copyfileobj(answer, out)
            out.flush()
            found = md5(Path(out.name))
            if found != source.md5:
                raise InputError(
                    f"{source.url}: expected the MD5 checksum {source.md5}, got {found}"
                )
    except (OSError, HTTPException) as error:
        raise InputError(f"{source.url} cannot be downloaded: {error}") from error
    return file


def md5(file: Path) -> str:
    """Compute the MD5 checksum of a file, hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "md5").hexdigest()
