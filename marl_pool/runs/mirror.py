"""Mirror of a folder in object storage, through fsspec.

A mirror has the folder's files under their own names. Folders with a ``manifest.json``,
such as checkpoints (`UNIT`), change as a whole: the manifest is uploaded last and
removed first, and a reader ignores a folder without it. While one is replaced, such as
the best policy, its old content is kept beside it.
"""

import os
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from marl_pool.files import atomic
from marl_pool.files.manifest import MANIFEST, problem_of
from marl_pool.utils.errors import EXTRAS, InputError, install_hint, one_line
from marl_pool.utils.text import print_line

UNIT = re.compile(
    r"(checkpoints/iter_[0-9]{6,12}|trajectories/round_[0-9]+|policy|teacher)/.+"
)
"""Files of folders that change as a whole; any other file changes on its own."""
OUTPUT = re.compile(r"(?:evaluation|videos)/.+")
"""Files that are written once and never replaced."""
SINGLE = re.compile(
    r"config\.yaml|metrics(\.damaged(-[0-9]+)?)?\.csv|error\.txt|results\.json|events\.out\.tfevents\.[\w.-]+"
    r"|sweep\.yaml|proposals\.yaml|table\.csv"
    r"|evaluation/[\w-]+\.(csv|json|npz|png)|videos/[\w-]+\.(webm|mp4|gif|webp)"
    r"|networks/(manifest\.json|fold_[0-9]+\.safetensors)|pictures/\w+\.png|data/.+"
)
"""All other files of runs and sweeps; anything else in a mirror is not downloaded."""
ASIDE = re.compile(r"((?:.*/)?)\.([^/]+)\.old/.+")
"""Old content of a folder that is being replaced."""
LAST = ("results.json", "sweep.yaml", "config.yaml")
"""Files that say that a fit is finished, and that a folder is a sweep or a run."""
ATTEMPTS, PAUSE = 3, 1.0
"""Attempts of a transfer, and seconds before the second; later pauses are doubled."""
SHOWN = 3
"""Maximum number of files in a message."""
INTERVAL = 10.0
"""Seconds between progress lines of a download."""

Result = TypeVar("Result")


class Mirror:
    """A folder and its mirror.

    Args:
        folder: folder on this machine; `fetch` creates it.
        url: URL of the mirror, with a protocol of fsspec.

    Attributes:
        problem: one line about what is not mirrored; empty after a complete update.

    Raises:
        InputError: an unknown protocol, or its package is missing.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.problem = folder, url, ""
        self.fs, self.root = _file_system(url)
        # State of each file when it was sent or fetched, in this process.
        self._sent: dict[str, tuple[int, int]] = {}
        # Bytes of this download, and the time of its last progress line.
        self._fetched, self._reported = 0, 0.0
        # Names in this download that are not of a run or sweep.
        self._unknown: set[str] = set()

    def list(self) -> set[str]:
        """List the files of the mirror, relative to it; none if it does not exist.

        Raises:
            InputError: the storage cannot be read.
        """
        return self._reached(self._list)

    def copy(self, name: str, path: Path) -> None:
        """Download one file to a path; errors are as in `list`."""
        self._reached(lambda: self.fs.get_file(self._at(name), str(path)))

    def probe(self) -> None:
        """Raise `InputError` unless a file can be written and removed."""
        target = self._at(".probe")

        def write() -> None:
            self.fs.pipe_file(target, b"probe")
            self.fs.rm_file(target)

        self._reached(write)

    @property
    def is_inside_folder(self) -> bool:
        """True if the mirror is the folder itself, or a part of it."""
        root = Path(self.root)
        return self._is_on_disk and root.resolve().is_relative_to(self.folder.resolve())

    # Upload

    def update(self, only: Collection[str] = ()) -> bool:
        """Upload what changed, and remove checkpoints that the folder no longer has.

        Args:
            only: top-level names to upload; nothing is removed then.

        Returns:
            False if it failed; `problem` says why.
        """
        try:
            _retry(lambda: self._update(only))
        except Exception as error:  # errors depend on the file system
            pending = {_unit(name) or name for name in self._changed(only)}
            names = _few(pending) or "what was removed"
            self.problem = f"not mirrored to {self.url}: {names}: {one_line(error)}"
            return False
        self.problem = ""
        return True

    def _changed(self, only: Collection[str]) -> dict[str, tuple[int, int]]:
        states = _states(self.folder)
        changed = {name for name in states if self._sent.get(name) != states[name]}
        return {name: states[name] for name in _chosen(changed, only)}

    def _update(self, only: Collection[str]) -> None:
        changed, remote = self._changed(only), self._list()
        # Keep the order of writing: single files, then what checkpoints need, then
        # these, and the policy last.
        for unit in sorted({_unit(name) for name in changed}, key=_order):
            names = [name for name in changed if _unit(name) == unit]
            if not unit:
                # Somebody else may have evaluated the run.
                existing = {name for name in names if OUTPUT.fullmatch(name)} & remote
                if existing and only:
                    raise FileExistsError(f"there is another {min(existing)}")
                for name in sorted(set(names) - existing, key=_single_order):
                    self._put(name)
            elif (self.folder / unit / MANIFEST).is_file():
                self._put_unit(unit, remote)
            # A file that changed meanwhile is sent again by the next update.
            self._sent |= {name: changed[name] for name in names}
        if only:
            return
        # Now that the mirror is complete, remove what is gone here or was set aside.
        local, remote = {_unit(name) for name in _states(self.folder)}, self._list()
        gone = {_unit(name) for name in remote} - local - {""}
        aside = {_aside(unit) for name in remote if (unit := _aside_of(name))}
        for unit in sorted(gone | aside):
            self._remove(unit, remote)

    def _put_unit(self, unit: str, remote: Collection[str]) -> None:
        manifest = f"{unit}/{MANIFEST}"
        if manifest in remote:
            # An earlier session may have sent it.
            if self.fs.cat_file(self._at(manifest)) == _bytes(self.folder / manifest):
                return
            # Keep the old content until the new one is complete.
            old = [name for name in remote if name.startswith(f"{unit}/")]
            for name in sorted(old, key=_manifest_last):
                copy = _aside(unit) + name.removeprefix(unit)
                self.fs.cp_file(self._at(name), self._at(copy))
            self._remove(unit, remote)
        names = [name for name in _states(self.folder) if _unit(name) == unit]
        for name in sorted(names, key=_manifest_last):
            self._put(name)

    def _put(self, name: str) -> None:
        source, target = str(self.folder / name), self._at(name)
        # Object storage replaces a file atomically; on disk, write beside it and move.
        if self._is_on_disk:
            above, _, last = target.rpartition("/")
            self.fs.put_file(source, f"{above}/.{last}.new")
            self.fs.mv(f"{above}/.{last}.new", target)
        else:
            self.fs.put_file(source, target)

    def _remove(self, unit: str, remote: Collection[str]) -> None:
        # Without its manifest nobody reads the rest.
        if (manifest := f"{unit}/{MANIFEST}") in remote:
            self.fs.rm_file(self._at(manifest))
        if self._is_on_disk:
            self.fs.rm(self._at(unit), recursive=True)
            return
        # In storage, `rm` takes a name with brackets for a pattern of other names.
        for name in sorted(remote):
            if name.startswith(f"{unit}/") and name != manifest:
                self.fs.rm_file(self._at(name))
        # Some servers have folders, which are left.
        with suppress(Exception):
            self.fs.rmdir(self._at(unit))

    # Download

    def fetch(self, *, only: Collection[str] = (), exact: bool = False) -> None:
        """Download what the folder lacks or has in another state.

        Files that are damaged in the mirror are fetched too; the checks of local
        folders report them when they are read. Results in the folder are never
        replaced. Files that do not belong to a run or sweep, as in a stranger's mirror,
        are not fetched, with a warning.

        Args:
            only: top-level names to download.
            exact: remove checkpoints that the mirror no longer has.

        Raises:
            InputError: the storage cannot be read, or names files outside the folder.
        """
        atomic.make_folder(self.folder)
        self._fetched, self._reported = 0, time.monotonic()
        self._unknown = set[str]()
        # A folder may be replaced while it is read.
        for attempt in range(ATTEMPTS):
            if self._reached(lambda: self._fetch(only, exact)):
                break
            time.sleep(PAUSE * 2**attempt)
        if self._unknown:
            names = _few(self._unknown)
            print_line(f"{self.url}: not fetched, as runs have no such files: {names}")

    def _fetch(self, only: Collection[str], exact: bool) -> bool:
        """Download once; return True if all folders are intact."""
        names = _chosen(self._list(), only)
        remote = {
            name
            for name in names
            if _unit(name) or _aside_of(name) or SINGLE.fullmatch(name)
        }
        self._unknown |= names - remote
        # First the logs: an interrupted download may leave more rows than checkpoints,
        # as training does. Last what makes the folder a run, and a fit finished.
        single = {name for name in remote if not (_unit(name) or _aside_of(name))}
        last = single & {*LAST}
        for name in sorted(single - last, key=_single_order):
            self._get_single(name)
        units = {unit for name in remote if (unit := _unit(name) or _aside_of(name))}
        intact = [self._get_unit(unit, remote) for unit in sorted(units)]
        if exact:
            for unit in {_unit(name) for name in _states(self.folder)} - units - {""}:
                atomic.discard(self.folder / unit)
        for name in sorted(last, key=_single_order):
            self._get_single(name)
        states = _states(self.folder)
        self._sent |= {name: states[name] for name in states.keys() & remote}
        return all(intact)

    def _get_single(self, name: str) -> None:
        if not (OUTPUT.fullmatch(name) and (self.folder / name).exists()):
            self._get(name, self.folder / name)

    def _get_unit(self, unit: str, remote: Collection[str]) -> bool:
        """Download one folder; return False if it is damaged."""
        folder = self.folder / unit
        for source in (unit, _aside(unit)):
            manifest = f"{source}/{MANIFEST}"
            if manifest not in remote:
                continue
            same = self.fs.cat_file(self._at(manifest)) == _bytes(folder / MANIFEST)
            if same and not problem_of(folder):
                return True
            atomic.validate_inside(self.folder, folder)
            with atomic.new_folder(folder) as new:
                for name in remote:
                    if name.startswith(f"{source}/"):
                        self._get(name, new / name.removeprefix(f"{source}/"))
            return not problem_of(folder)
        # Its upload has not finished.
        return True

    def _get(self, name: str, path: Path) -> None:
        atomic.validate_inside(self.folder, path)
        atomic.make_folder(path.parent)
        with atomic.new_path(path) as new:
            self.fs.get_file(self._at(name), str(new))
            self._fetched += new.stat().st_size
        if time.monotonic() - self._reported >= INTERVAL:
            self._reported = time.monotonic()
            print_line(f"fetching {self.url}: {self._fetched / 1e6:,.1f} MB")

    # Helpers

    @property
    def _is_on_disk(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self.fs, LocalFileSystem)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _list(self) -> set[str]:
        self.fs.invalidate_cache()
        names = {path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root)}
        for name in names:
            if name.startswith("/") or {"..", ""} & {*name.split("/")}:
                raise InputError(f"{self.url}: expected names of files, got {name!r}")
        return {name for name in names if "/." not in f"/{name}" or _aside_of(name)}

    def _reached(self, action: Callable[[], Result]) -> Result:
        try:
            return _retry(action)
        except InputError:
            raise
        except Exception as error:  # errors depend on the file system
            raise InputError(
                f"storage: expected a place that can be read and written, got "
                f"{self.url}: {one_line(error)}"
            ) from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs  # loaded only for storage
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0]
    try:
        # Only disks need folders.
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        fs, root = url_to_fs(url, **options)
    except ImportError as error:
        implementation = known_implementations.get(protocol, {}).get("class", "")
        module = implementation.partition(".")[0]
        hint = install_hint(module) if module in EXTRAS else one_line(error)
        raise InputError(f"storage: {url}: {hint}") from error
    except Exception as error:
        raise InputError(
            f"storage: expected a URL of fsspec, such as s3://bucket/runs or "
            f"file:///folder, got {url}: {one_line(error)}"
        ) from error
    return fs, str(root).rstrip("/")


def _retry(action: Callable[[], Result]) -> Result:
    for attempt in range(ATTEMPTS - 1):
        try:
            return action()
        except InputError:
            raise
        except Exception:
            time.sleep(PAUSE * 2**attempt)
    return action()


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return time and size of each file, without links and hidden files."""
    states = {}
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in sorted(files)):
            if not path.name.startswith(".") and not path.is_symlink():
                stat = path.stat()
                name = path.relative_to(folder).as_posix()
                states[name] = stat.st_mtime_ns, stat.st_size
    return states


def _chosen(names: set[str], only: Collection[str]) -> set[str]:
    """Return the names below ``only``, top-level names; all if it is empty."""
    return {name for name in names if not only or name.split("/")[0] in only}


def _few(names: Collection[str]) -> str:
    suffix = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + suffix


def _unit(name: str) -> str:
    match = UNIT.fullmatch(name)
    return match[1] if match else ""


def _aside(unit: str) -> str:
    above, slash, name = unit.rpartition("/")
    return f"{above}{slash}.{name}.old"


def _aside_of(name: str) -> str:
    """Return the folder whose old content includes a file, or an empty text."""
    matched = ASIDE.fullmatch(name)
    unit = matched[1] + matched[2] if matched else ""
    # A stranger's mirror may hold other names, such as `evaluation/...old/`.
    hidden = "/." in f"/{unit}"
    return unit if not hidden and _unit(f"{unit}/{MANIFEST}") == unit else ""


def _single_order(name: str) -> tuple[int, bool, str]:
    """Sort single files such that each follows those whose presence it implies."""
    place = LAST.index(name) + 1 if name in LAST else 0
    return place, name.endswith(MANIFEST), name


def _order(unit: str) -> tuple[bool, bool, str]:
    return unit.endswith("policy"), "checkpoints/" in unit, unit


def _manifest_last(name: str) -> tuple[bool, int]:
    """Sort a folder's manifest last, after manifests of its subfolders."""
    return name.endswith(f"/{MANIFEST}"), -name.count("/")


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
