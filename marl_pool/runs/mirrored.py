"""Storage of runs and sweeps: mirrors of their folders at a URL.

The run ``runs/NAME`` with ``storage=URL`` is mirrored at ``URL/NAME``, and a trial of a
sweep at ``URL/SWEEP/trials/NAME``. Credentials are those that fsspec finds by itself.
"""

import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from marl_pool.envs.options import expand_counts
from marl_pool.files import atomic, manifest
from marl_pool.files.hub import is_hub
from marl_pool.files.manifest import MANIFEST
from marl_pool.options.differences import differences
from marl_pool.options.overrides import parse
from marl_pool.runs.mirror import Mirror
from marl_pool.runs.run import (
    CONFIG,
    LOCK,
    OF_MACHINE,
    OUTPUTS,
    VERSION,
    Run,
    files_in,
)
from marl_pool.runs.sweep import CONTENT, PROPOSALS, Sweep, proposal_name
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import is_url, print_line, quoted

SAVED = re.compile(r"checkpoints/iter_(\d+)/manifest\.json")
OF_SESSION = {
    *OF_MACHINE,
    "total_steps",
    "total_generations",
    "total_batches",
    "data_dir",
    "download",
    "package_version",
}
"""Keys that may differ between the sessions of one run."""


def mirror_of(folder: Path, storage: str) -> Mirror:
    """Return the mirror of a folder, ``storage/NAME``.

    Raises:
        InputError: an unknown protocol, or a place in the folder.
    """
    mirror = Mirror(folder, f"{storage.rstrip('/')}/{folder.resolve().name}")
    if mirror.is_inside_folder:
        raise InputError(
            f"storage: expected a place outside of the folder {folder}, got {storage}"
        )
    return mirror


@contextmanager
def mirrored(run: Run, storage: str | None) -> Iterator[Mirror | None]:
    """Mirror a run after each checkpoint in the block and at its end.

    A failed upload is a warning, and the next checkpoint sends what is missing. After
    the block, `Mirror.problem` says what the last upload lacked.

    Args:
        run: run whose lock is held.
        storage: URL, or None for no mirror.

    Raises:
        InputError: the storage cannot be written, or has another or a newer run.
    """
    if storage is None:
        yield None
        return
    mirror = mirror_of(run.path, storage)
    # A run with older checkpoints would remove newer ones from the mirror.
    remote = mirror.list()
    _validate_same(run.path, mirror, remote)
    if (newest := _newest(remote)) > _newest(_names(run.path)):
        raise InputError(
            f"{run.path}: expected a run as far as its mirror, got one without "
            f"iteration {newest}; marl-pool resume {quoted(mirror.url)} continues there"
        )
    mirror.probe()

    def update() -> None:
        if not mirror.update():
            print_line(f"{mirror.problem}; the next upload tries again")

    run.on_saved = update
    try:
        yield mirror
    except BaseException:  # Ctrl-C too
        # Do not upload the mere configuration of a run that could not begin.
        if run.metrics_path.is_file():
            run.close()
            update()
        raise
    # TensorBoard's events are written by a thread until they are closed.
    run.close()
    mirror.update()


def validate_new(folder: Path, storage: str | None) -> None:
    """Reject a folder for a new run or sweep whose mirror exists already."""
    if storage is None:
        return
    mirror = mirror_of(folder, storage)
    if existing := {CONFIG, CONTENT, PROPOSALS} & mirror.list():
        raise InputError(
            f"storage: expected nothing at {mirror.url} yet, got a {min(existing)}; to "
            f"continue: marl-pool resume {quoted(mirror.url)}"
        )


def restore(folder: Path, storage: str | None) -> None:
    """Fetch a run from its mirror if the folder is missing or behind.

    Raises:
        InputError: the storage cannot be read, or has another run, or a process on
            this machine is training the run.
    """
    if storage is not None:
        _restore(mirror_of(folder, storage))


def restore_sweep(folder: Path, storage: str | None) -> None:
    """Fetch the description of a sweep from its mirror, unless the folder has one.

    Its trials are fetched by `restore`, one by one.

    Raises:
        InputError: the storage cannot be read.
    """
    if storage is None or (folder / CONTENT).is_file():
        return
    mirror = mirror_of(folder, storage)
    if CONTENT in mirror.list():
        mirror.fetch(only=(CONTENT, PROPOSALS))


def validate_same_sweep(sweep: Sweep, mirror: Mirror) -> None:
    """Reject a mirror of another sweep, or of a run.

    Settings that a resumed sweep may change are not compared.

    Raises:
        InputError: the storage cannot be read, or has something else.
    """
    remote_names = mirror.list()
    prefix = f"storage: expected the sweep {sweep.path} at {mirror.url}, got"
    if CONFIG in remote_names:
        raise InputError(f"{prefix} a run")
    if CONTENT not in remote_names:
        return
    with tempfile.TemporaryDirectory() as scratch:
        mirror.copy(CONTENT, Path(scratch, CONTENT))
        with _naming_mirror(scratch, mirror):
            remote = _identity(Sweep.open(scratch))
    for key, local_value in _identity(sweep).items():
        if remote[key] != local_value:
            raise InputError(
                f"{prefix} another, with {key} {remote[key]!r:.200} in place of "
                f"{local_value!r:.200}"
            )


def _identity(sweep: Sweep) -> dict[str, Any]:
    """Return what no session of a sweep may change."""
    return {
        "verb": sweep.verb,
        # The order of the keys names the trials, and decides what a search proposes.
        "grid": list(sweep.grid.items()),
        "ranges": list((sweep.space or {}).items()),
        "overrides": lasting_overrides(sweep.overrides),
    }


def lasting_overrides(overrides: Sequence[str]) -> list[str]:
    """Return a sweep's overrides without those that a session may change."""
    keys = {*OF_SESSION, "sweep", "env.workers"}
    return [
        text
        for text in overrides
        if keys.isdisjoint((key := parse(text).key, key.split(".")[0]))
    ]


@contextmanager
def _naming_mirror(scratch: str, mirror: Mirror) -> Iterator[None]:
    """Name the mirror in place of the folder that its files were copied to."""
    try:
        yield
    except InputError as error:
        message = str(error).replace(scratch, mirror.url)
        raise InputError(f"storage: {message}") from error


def restore_proposals(sweep: Sweep, mirror: Mirror) -> None:
    """Fetch the trials of a search that another machine has proposed.

    Raises:
        InputError: the storage cannot be read, or has another search, or a process on
            this machine is running the sweep.
    """
    if PROPOSALS not in mirror.list():
        return
    with tempfile.TemporaryDirectory() as scratch:
        mirror.copy(PROPOSALS, Path(scratch, PROPOSALS))
        with _naming_mirror(scratch, mirror):
            remote_trials = Sweep(scratch, {}, [], space=sweep.space).proposals()
    local_trials = sweep.proposals()
    for number, (local_trial, remote_trial) in enumerate(
        zip(local_trials, remote_trials, strict=False)
    ):
        if local_trial.values != remote_trial.values:
            raise InputError(
                f"storage: expected the search {sweep.path} at {mirror.url}, got "
                f"another, with trial {proposal_name(number)} {remote_trial.values} in "
                f"place of {local_trial.values}"
            )
        remote_trial.stopped_early |= local_trial.stopped_early
    merged = [*remote_trials, *local_trials[len(remote_trials) :]]
    if merged != local_trials:
        with sweep.lock():
            sweep.write_proposals(merged)


def _restore(mirror: Mirror) -> None:
    folder, remote = mirror.folder, mirror.list()
    if CONFIG not in remote:
        return
    if not (folder / CONFIG).is_file():
        if folder.is_dir() and files_in(folder):
            raise InputError(
                f"{folder}: expected a folder for the run {mirror.url}, got one with "
                f"other files and no {CONFIG}"
            )
        atomic.make_folder(folder)
        with atomic.locked(folder / LOCK, None):
            # Another process may have fetched it while this one waited.
            if not (folder / CONFIG).is_file():
                _fetch_new(mirror)
    _validate_same(folder, mirror, remote)
    # The results of a fit follow its last checkpoint.
    local = _names(folder)
    results = {name for name in remote - local if "/" not in name}
    ahead = _newest(remote) - _newest(local)
    if ahead > 0 or (results and not ahead):
        refusal = f"{folder}: another process is training this run"
        with atomic.locked(folder / LOCK, refusal):
            mirror.fetch()


def _fetch_new(mirror: Mirror) -> None:
    """Fetch a run into a folder without one, whose lock this process holds."""
    with atomic.beside_of(mirror.folder) as new:
        new.mkdir()
        Mirror(new, mirror.url).fetch()
        # Renaming replaces an empty folder only.
        atomic.discard_leftovers(mirror.folder)
        (mirror.folder / LOCK).unlink()
        try:
            new.rename(mirror.folder)
        except OSError as error:
            raise InputError(
                f"{mirror.folder}: another process is fetching this run"
            ) from error


def restore_from(url: str) -> Path:
    """Fetch a run to ``runs/NAME``, or the description of a sweep to ``sweeps/NAME``.

    An existing folder is kept if it has the same run and is not behind.

    Raises:
        InputError: there is nothing at the URL, or another run in the folder.
    """
    name = url.rpartition("/")[2]
    mirror = Mirror(Path("runs", name), url)
    remote = mirror.list()
    if CONTENT in remote:
        mirror.folder = Path("sweeps", name)
        restore_sweep(mirror.folder, url.rpartition("/")[0])
    elif CONFIG in remote:
        _restore(mirror)
    else:
        raise InputError(f"{url}: expected a run or a sweep, got no {CONFIG}")
    return mirror.folder


def cached(url: str) -> Mirror:
    """Fetch a run to the user's cache, for commands that read runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(base, "marl-pool", sha256(url.encode()).hexdigest()[:16])
    mirror = Mirror(place / url.rpartition("/")[2], url)
    if CONFIG not in mirror.list():
        raise InputError(f"{url}: expected a run, got no {CONFIG}")
    atomic.make_folder(place)
    with atomic.locked(place / LOCK, None):
        mirror.fetch(exact=True)
    return mirror


@contextmanager
def local_copies(runs: list[str]) -> Iterator[list[str]]:
    """Fetch runs given as URLs, and upload results that are written to them.

    Args:
        runs: folders, URLs, and names of policies on the hub, which stay as they are.

    Yields:
        The folders.

    Raises:
        InputError: there is no run at a URL, or the results cannot be uploaded.
    """
    urls = [run for run in runs if is_url(run) and not is_hub(run)]
    mirrors = {url: cached(url.rstrip("/")) for url in urls}
    try:
        yield [str(mirrors[run].folder) if run in mirrors else run for run in runs]
    finally:
        failed = [mirror for mirror in mirrors.values() if not mirror.update(OUTPUTS)]
    for mirror in failed:
        raise InputError(f"{mirror.problem}; the results are in {mirror.folder}")


def _validate_same(folder: Path, mirror: Mirror, remote_names: Collection[str]) -> None:
    """Reject a mirror whose configuration is not of the folder's run.

    The folder's may have been edited since the mirror's newest checkpoint.
    """
    if CONFIG not in remote_names or not (folder / CONFIG).is_file():
        return
    newest = max(filter(SAVED.fullmatch, remote_names), default=None)
    with tempfile.TemporaryDirectory() as scratch:
        if newest and (folder / newest).is_file():
            mirror.copy(newest, Path(scratch, MANIFEST))
            if Path(scratch, MANIFEST).read_bytes() == (folder / newest).read_bytes():
                return
        mirror.copy(CONFIG, Path(scratch, CONFIG))
        local, remote = (
            manifest.read_complete_yaml(source / CONFIG, last=VERSION)
            for source in (folder, Path(scratch))
        )
    for config in (local, remote):
        if isinstance(config.get("env"), dict):  # a supervised fit has none
            config["env"] = expand_counts(config["env"])
    # Another version may have other keys.
    ignored = OF_SESSION | (local.keys() ^ remote.keys())
    if changed := differences(local, remote, ignored):
        raise InputError(
            f"storage: expected the run {folder} at {mirror.url}, got another: "
            f"{'; '.join(changed[:3])}"
        )


def _names(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files}


def _newest(names: Collection[str]) -> int:
    """Return the newest iteration with a complete checkpoint; 0 without one."""
    matches = (SAVED.fullmatch(name) for name in names)
    return max((int(match[1]) for match in matches if match), default=0)
