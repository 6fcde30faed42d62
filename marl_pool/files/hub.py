"""Folders in repositories of the Hugging Face Hub: their names, and bounded downloads.

A name is ``hf://USER/NAME[@REVISION][/FOLDER]``. Only requested files are downloaded,
up to a size, into the cache of huggingface_hub, and none of them is executed.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from marl_pool.utils.errors import InputError, one_line, validate_module
from marl_pool.version import __version__

PREFIX, FORM = "hf://", "hf://USER/NAME[@REVISION][/FOLDER]"
PATTERN = re.compile(
    r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/pr/\d+|[\w.-]+))?"
    r"(?:/(?P<folder>[\w.-]+(?:/[\w.-]+)*))?/?",
    re.ASCII,
)
COMMIT = re.compile(r"[0-9a-f]{40}")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubFolder:
    """A folder in a repository.

    Attributes:
        repository: ``USER/NAME``.
        revision: branch, tag or commit, or None for the main branch.
        folder: path in the repository; empty for all of it.
    """

    repository: str
    revision: str | None = None
    folder: str = ""

    @classmethod
    def parse(cls, text: str) -> "HubFolder":
        """Parse a name, or raise `InputError`."""
        match = PATTERN.fullmatch(text)
        # A part of dots would lead out of the repository, and out of the cache.
        if match is None or {".", ".."} & {*re.split("[/@]", text)}:
            raise InputError(f"expected {FORM}, got {text!r:.200}")
        return cls(match["repository"], match["revision"], match["folder"] or "")

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        folder = f"/{self.folder}" if self.folder else ""
        return f"{PREFIX}{self.repository}{revision}{folder}"

    @property
    def name(self) -> str:
        """The last part of the folder, or of the repository."""
        return PurePosixPath(self.repository, self.folder).name

    def inside(self, file: str) -> str:
        """Return the path of a file in the repository."""
        return str(PurePosixPath(self.folder, file))


def is_hub(path: object) -> bool:
    """Return True for text that begins like the name of a repository."""
    return isinstance(path, str) and path.startswith(PREFIX)


def hub_client() -> Any:
    """Return the client of the hub; raise `InputError` without huggingface_hub."""
    validate_module("huggingface_hub")
    from huggingface_hub import HfApi

    return HfApi(library_name="marl_pool", library_version=__version__)


def fetch(
    source: HubFolder, limits: Mapping[str, int], optional: Collection[str] = ()
) -> tuple[Path, HubFolder]:
    """Download files of a folder that are not in the cache yet.

    A commit that is in the cache needs no network. Without a network, files of an
    earlier download are used.

    Args:
        source: the folder.
        limits: maximum bytes of each file, by its name in the folder.
        optional: names of files that may be missing.

    Returns:
        The folder in the cache, and ``source`` with the commit as its revision.

    Raises:
        InputError: no such repository, revision or file; no access; too large a file.
    """
    client = hub_client()
    required = [name for name in limits if name not in optional]
    files: dict[str, Path] = {}
    with explain_hub_errors(source):
        if COMMIT.fullmatch(source.revision or ""):
            files = _cached(source, limits)
        if not files.keys() >= {*required}:
            files = _download(client, source, limits, required)
    # Another program may have filled the cache.
    for name, file in files.items():
        _validate_size(source, name, file.stat().st_size, limits[name])
    # The cache names a snapshot after its commit.
    folder = files[required[0]].parent
    depth = len(PurePosixPath(source.folder).parts)
    commit = [folder, *folder.parents][depth].name
    return folder, replace(source, revision=commit)


@contextmanager
def explain_hub_errors(source: HubFolder) -> Iterator[None]:
    """Turn an error of the hub, its client or the network into an `InputError`."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        line = "its authors have to grant you access, on the repository's page"
        raise InputError(f"{source}: {line}; {LOGIN}") from error
    except errors.RepositoryNotFoundError as error:
        line = f"no such repository, or one that is not open to you; {LOGIN}"
        raise InputError(f"{source}: {line}") from error
    except errors.RevisionNotFoundError as error:
        line = f"no such revision {source.revision!r}"
        raise InputError(f"{source}: {line}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = f"; {LOGIN}" if status in (401, 403) else ""
        raise InputError(
            f"{source}: the hub refuses: {one_line(error)}{hint}"
        ) from error
    except (errors.HTTPError, ConnectionError, errors.EntryNotFoundError) as error:
        line = f"the hub cannot be reached: {one_line(error)}"
        raise InputError(f"{source}: {line}") from error
    except (errors.HFValidationError, errors.FileMetadataError) as error:
        raise InputError(f"{source}: {one_line(error)}") from error
    except json.JSONDecodeError as error:
        line = "the answer is not the hub's; HF_ENDPOINT, if set, must be a hub"
        raise InputError(f"{source}: {line}") from error


def _download(
    client: Any, source: HubFolder, limits: Mapping[str, int], required: Collection[str]
) -> dict[str, Path]:
    from huggingface_hub import errors

    try:
        # Compare the sizes before anything is downloaded.
        place = {"repo_id": source.repository, "revision": source.revision}
        commit = client.model_info(**place).sha
        paths = [source.inside(name) for name in limits]
        entries = client.get_paths_info(source.repository, paths, revision=commit)
        sizes = {entry.path: getattr(entry, "size", None) for entry in entries}
        for name, path in zip(limits, paths, strict=True):
            if (size := sizes.get(path)) is not None:
                _validate_size(source, name, size, limits[name])
            elif name in required:
                raise InputError(f"no policy in {source}: {name} is missing")
        client.snapshot_download(**place, allow_patterns=paths)
    except (errors.HTTPError, ConnectionError) as error:
        # Without an answer, or if the hub fails, an earlier download will do.
        response = getattr(error, "response", None)
        is_down = response is None or response.status_code >= 500
        files = _cached(source, limits) if is_down else {}
        if not files.keys() >= {*required}:
            raise
        return files
    return _cached(source, limits)


def _cached(source: HubFolder, names: Iterable[str]) -> dict[str, Path]:
    from huggingface_hub import try_to_load_from_cache

    paths = {
        name: try_to_load_from_cache(
            source.repository, source.inside(name), revision=source.revision
        )
        for name in names
    }
    return {name: Path(path) for name, path in paths.items() if isinstance(path, str)}


def _validate_size(source: HubFolder, name: str, size: int, limit: int) -> None:
    if size > limit:
        raise InputError(
            f"{source}: {name}: expected at most {limit:,} bytes, got {size:,}"
        )
