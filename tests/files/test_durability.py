"""After a power cut at any moment the run can be resumed and has its policy."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.wind_env import WINDY
from marl_pool import InputError
from marl_pool.cli.main import main
from marl_pool.files import atomic
from marl_pool.files.manifest import MANIFEST, problem_of, sealed_json, write_manifest
from marl_pool.runs.run import Best, Run

CONFIG = {"env": {"name": "simple_centroid"}, "seed": 3}


class Disk:
    """A model of a disk with a write cache, fed by the calls that the program makes.

    A file's bytes are safe once `fsync` returned, as they were then. What a folder
    holds is safe once it was synced itself. What a real power cut leaves of the rest
    is anything; two extremes are tried at each step:

    - *lazy*: of each folder the names that it had when it was synced;
    - *eager*: all names, as journalling file systems write them before the bytes: then
      unsynced files are there and empty.

    Args:
        root: the folder that is watched.
    """

    WATCHED = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.count = root, itertools.count()
        self.ids: dict[int, int] = {}
        self.bytes: dict[int, bytes] = {}
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}
        self.images: list[tuple[str, dict[str, dict[str, bytes | None]]]] = []
        self.sync(root)
        for name in self.WATCHED:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            freed = self._freed_inodes(name, arguments, options)
            result = call(*arguments, **options)
            for inode in freed:
                self.ids.pop(inode, None)
            if name == "fsync":
                self.sync(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            self.images.append((f"{name} {arguments}", self.image()))
            return result

        return wrapped

    def _freed_inodes(self, name: str, arguments: Any, options: Any) -> list[int]:
        """Inodes that the call frees, which others may get."""
        try:
            if name in ("unlink", "rmdir"):
                folder_fd = options.get("dir_fd")
                return [
                    os.stat(
                        arguments[0], dir_fd=folder_fd, follow_symlinks=False
                    ).st_ino
                ]
            if name in ("rename", "replace"):
                return [os.stat(arguments[1], follow_symlinks=False).st_ino]
        except FileNotFoundError:
            pass
        return []

    def id_of(self, path: Path) -> int:
        inode = path.lstat().st_ino
        if inode not in self.ids:
            self.ids[inode] = next(self.count)
        return self.ids[inode]

    def sync(self, path: Path) -> None:
        if path.is_dir():
            self.names[self.id_of(path)] = {
                item.name: (self.id_of(item), item.is_dir()) for item in path.iterdir()
            }
        else:
            self.bytes[self.id_of(path)] = path.read_bytes()

    def image(self) -> dict[str, dict[str, bytes | None]]:
        """Return the files after a power cut: bytes by path, None for a folder."""
        lazy: dict[str, bytes | None] = {}

        def add(folder: int, prefix: str) -> None:
            for name, (number, is_folder) in self.names.get(folder, {}).items():
                if is_folder:
                    lazy[prefix + name] = None
                    add(number, f"{prefix}{name}/")
                else:
                    lazy[prefix + name] = self.bytes.get(number, b"")

        add(self.id_of(self.root), "")
        eager = {
            path.relative_to(self.root).as_posix(): None
            if path.is_dir()
            else self.bytes.get(self.id_of(path), b"")
            for path in sorted(self.root.rglob("*"))
        }
        return {"lazy": lazy, "eager": eager}


def rebuild(image: dict[str, bytes | None], folder: Path) -> None:
    for name, content in sorted(image.items()):
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def write_parts(folder: Path, iteration: int) -> None:
    """Write the parts of a checkpoint and of a policy, without a sync."""
    (folder / "deep" / "down").mkdir(parents=True)
    (folder / "deep" / "down" / "weights").write_text(f"weights {iteration}" * 100)
    (folder / "progress.json").write_text(str(iteration))


def save(run: Run, *iterations: int) -> None:
    for iteration in iterations:
        with run.checkpoint(iteration) as folder:
            write_parts(folder, iteration)


def train_a_little(path: Path) -> Iterator[int]:
    """Write as the drivers do; yield each iteration whose checkpoint is complete."""
    run = Run.create(path, CONFIG)
    with run.lock():
        for iteration in range(1, 6):
            run.log({"iteration": iteration, "loss": 1 / iteration})
            save(run, iteration)
            yield iteration
            if iteration in (1, 2, 4):
                with run.save_policy_dir(Best(iteration, float(iteration))) as folder:
                    write_parts(folder, iteration)
                    write_manifest(folder)
            run.prune(2)
    run.close()


@pytest.fixture
def no_events(monkeypatch):
    monkeypatch.setattr(Run, "_writer", lambda run: None)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", CONFIG)


@pytest.mark.usefixtures("no_events")
def test_a_power_cut_at_any_moment_leaves_a_run_to_go_on_from(tmp_path, monkeypatch):
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patched:
        disk = Disk(root, patched)
        safe = {0: 0}  # by number of calls, the checkpoint that must be there
        for iteration in train_a_little(root / "runs" / "run"):
            safe[len(disk.images)] = iteration
    assert len(disk.images) > 150
    monkeypatch.setattr(atomic, "sync", lambda path: None)
    for kind in ("lazy", "eager"):
        best_seen, previous = set(), None
        for number, (call, images) in enumerate(disk.images, 1):
            saved = max(safe[count] for count in safe if count <= number)
            if (images[kind], saved) != previous:
                where = f"{kind}, after call {number}, {call}"
                best_seen |= bests_after(images[kind], tmp_path / "after", saved, where)
            previous = images[kind], saved
        assert best_seen == {1, 2, 4}


def bests_after(
    image: dict[str, bytes | None], folder: Path, saved: int, where: str
) -> set[int]:
    """Open the run of an image, and return the iteration of its best policy, if any."""
    shutil.rmtree(folder, ignore_errors=True)
    rebuild(image, folder)
    if not (folder / "runs" / "run" / "config.yaml").is_file():
        assert not saved, where
        return set()
    run = Run.open(folder / "runs" / "run")
    with run.lock():
        latest = run.latest_checkpoint()
        assert run.last_saved_iteration >= saved, where
        if latest is not None:
            weights = latest / "deep" / "down" / "weights"
            assert weights.read_text() == f"weights {run.last_saved_iteration}" * 100
            assert run.resume_at(run.last_saved_iteration) == "", where
            assert run.rows()[-1]["iteration"] == run.last_saved_iteration, where
        if not run.policy_dir.is_dir():
            assert saved <= 1, where
            return set()
        # The policy is whole and as good as best.json says.
        assert problem_of(run.policy_dir) == "", where
        assert run.best is not None
        progress = (run.policy_dir / "progress.json").read_text()
        assert progress == str(run.best.iteration) == str(int(run.best.score)), where
        return {run.best.iteration}


def test_the_model_finds_what_is_not_synced(tmp_path, monkeypatch):
    """The model loses a folder that is renamed without a sync, as was once done."""
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patched:
        disk = Disk(root, patched)
        (root / "new").mkdir()
        write_parts(root / "new", 1)
        (root / "new").rename(root / "checkpoint")
    images = disk.images[-1][1]
    assert images["lazy"] == {}
    assert images["eager"]["checkpoint/progress.json"] == b""


# Falling back


def test_pruning_counts_whole_checkpoints_only(run):
    save(run, *range(1, 6))
    for damaged in (2, 4, 5):
        path = run.path / "checkpoints" / f"iter_{damaged:06d}"
        (path / "progress.json").write_text("")
    reopened = Run.open(run.path)
    assert reopened.last_saved_iteration == 3
    reopened.prune(2)
    # The damaged one before the newest whole one is no use; later ones are replaced.
    kept = [path.name for path in reopened.checkpoints()]
    assert kept == ["iter_000001", "iter_000003", "iter_000004", "iter_000005"]
    save(reopened, 4)
    assert reopened.last_saved_iteration == 4


ABOUT = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    "files",
    [
        {},
        [],
        {"progress.json": 5},
        {"progress.json": {"bytes": 1}},
        {"/etc/hostname": ABOUT},
        {"../../config.yaml": ABOUT},
    ],
    ids=str,
)
def test_a_manifest_that_lists_no_files_of_its_folder_is_damaged(run, files):
    save(run, 1, 2)
    manifest = run.checkpoints()[1] / MANIFEST
    content = {**json.loads(manifest.read_text()), "files": files}
    manifest.write_text(json.dumps(sealed_json(content)))
    reopened = Run.open(run.path)
    assert reopened.damage_of(manifest.parent).startswith(MANIFEST)
    assert reopened.last_saved_iteration == 1


def test_a_manifest_without_its_own_checksum_is_damaged(tmp_path):
    (tmp_path / "part").write_text("1")
    write_manifest(tmp_path)
    file = tmp_path / MANIFEST
    file.write_text(file.read_text().replace("sha256", "sha25v"))
    assert problem_of(tmp_path).startswith(MANIFEST)


@pytest.mark.parametrize(
    "name",
    [
        *("iter_000010.bak", "iter_000010 (copy)", "iter_", "iter_10", "iter_0000010"),
        f"iter_{'9' * 21}",
    ],
)
def test_stray_names_beside_the_checkpoints_are_passed_over(run, name):
    save(run, 1)
    shutil.copytree(run.latest_checkpoint(), run.path / "checkpoints" / name)
    reopened = Run.open(run.path)
    assert reopened.last_saved_iteration == 1
    reopened.prune(1)
    assert (run.path / "checkpoints" / name).is_dir()


@pytest.mark.parametrize("text", ["", '{"iteration": 1, "score": 9.0, "of": "return"}'])
def test_a_damaged_best_score_is_reported_and_restored(run, capsys, text):
    best = Best(1, 5.0)
    with run.checkpoint(1, best=best) as folder:
        write_parts(folder, 1)
        (folder / "policy").mkdir(exist_ok=True)
        (folder / "policy" / "weights").write_text("best")
    with run.save_policy_dir(best) as folder:
        (folder / "weights").write_text("best")
        write_manifest(folder)
    save(run, 2)
    (run.policy_dir / "best.json").write_text(text)
    reopened = Run.open(run.path)
    with pytest.raises(InputError, match=r"best.json cannot be read: "):
        _ = reopened.best
    reopened.recover()
    assert reopened.best == best
    assert (run.policy_dir / "weights").read_text() == "best"
    (message,) = capsys.readouterr().err.splitlines()
    assert "best.json cannot be read: best.json has" in message
    assert message.endswith("restored from iteration 1")


def test_a_checkpoint_with_an_unwritten_part_is_not_saved(run):
    def save(*parts: str) -> None:
        with run.checkpoint(1, parts) as folder:
            write_parts(folder, 1)
            (folder / "empty").touch()

    save("progress.json", "deep/*/weights")
    for missing in ("state.pkl", "deep/*/bias", "empty"):
        with pytest.raises(OSError, match="was not written"):
            save(missing)
    assert run.last_saved_iteration == 1
    assert not list((run.path / "checkpoints").glob(".*"))


# Links, and temporary names


WRITERS: dict[str, Callable[[Path], Any]] = {
    "new_file": lambda file: _write(atomic.new_file(file), "new"),
    "new_binary_file": lambda file: _write(atomic.new_binary_file(file), b"new"),
    "new_path": lambda file: _write_path(file),
    "appended": lambda file: _write(atomic.appended(file), "new"),
    "locked": lambda file: _write(atomic.locked(file, None), None),
}


def _write(opened: Any, content: Any) -> None:
    with opened as out:
        if content is not None:
            out.write(content)


def _write_path(file: Path) -> None:
    with atomic.new_path(file) as path:
        path.write_text("new")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("exists", [True, False])
def test_no_writer_follows_a_link(tmp_path, writer, exists):
    folder, outside = tmp_path / "folder", tmp_path / "bashrc"
    folder.mkdir()
    if exists:
        outside.write_text("precious")
    for name in ("file.csv", ".file.csv.new"):
        (folder / name).symlink_to(outside)
    if writer in ("appended", "locked"):
        with pytest.raises((OSError, InputError)):
            WRITERS[writer](folder / "file.csv")
    else:
        WRITERS[writer](folder / "file.csv")
        assert not (folder / "file.csv").is_symlink()
    assert outside.exists() == exists
    assert not exists or outside.read_text() == "precious"


def _write_folder(file: Path) -> None:
    with atomic.new_folder(file) as folder:
        (folder / "content").write_text("new")


@pytest.mark.parametrize(
    ("writer", "written"),
    [
        *((writer, "file") for writer in WRITERS.values()),
        (_write_folder, "file/content"),
        (lambda file: atomic.make_folder(file / "deep"), "file/deep"),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_the_folder_written_to_may_be_a_link(tmp_path, writer, written, exists):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to("real")
    for _ in range(1 + exists):
        writer(link / "file")
    assert (real / written).exists()
    assert link.is_symlink()


def test_a_run_below_a_link_is_trained_resumed_evaluated_and_reported(
    tmp_path, monkeypatch
):
    for name in ("runs", "reports", "results", "cache"):
        (tmp_path / "scratch" / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "scratch" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = (*WINDY, "total_generations=2")
    url, plug_in = f"file://{tmp_path}/store", ("--plugin", "helpers.wind_env:WindEnv")
    results = ("episodes=2", "threads=1", "suite=quick")
    for command in (
        ("evolve", *small, "--run-dir=runs/a", f"--storage={url}"),
        ("resume", "runs/a", *plug_in, "total_generations=4"),
        ("evaluate", "runs/a", *plug_in, *results, "--out=results/a"),
        ("evaluate", f"{url}/a", *plug_in, *results),
        ("report", "runs/a", *plug_in, "videos=false", "--out=reports/a.html"),
    ):
        assert main([*command]) == 0, command
    # A linked folder of a run is one, too.
    (tmp_path / "scratch" / "b").mkdir()
    (tmp_path / "b").symlink_to("scratch/b")
    assert main(["evolve", *small, "--run-dir=b"]) == 0
    for file in ("runs/a/metrics.csv", "results/a", "reports/a.html", "b/metrics.csv"):
        assert (tmp_path / "scratch" / file).exists()


def test_temporary_names_cannot_be_guessed(tmp_path):
    names = []
    for _ in range(3):
        with atomic.new_file(tmp_path / "a.csv") as out:
            names.append(Path(out.name).name)
        with atomic.new_folder(tmp_path / "b") as folder:
            names.append(folder.name)
    assert len(set(names)) == 6
    assert all(atomic.LEFTOVER.fullmatch(name) for name in names)


def test_a_lock_leaves_what_is_in_its_file(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with atomic.locked(tmp_path / ".lock", "no"):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


def lock(run: Run) -> None:
    with run.lock():
        pass


WRITES: dict[str, Callable[[Run], object]] = {
    "evaluation": Run.make_evaluation_dir,
    "videos": Run.make_videos_dir,
}
PARTS = ["checkpoints", "policy", "metrics.csv", "error.txt", "networks", ".lock"]


@pytest.mark.parametrize("name", [*WRITES, *PARTS, "checkpoints/iter_000003"])
def test_parts_of_a_run_that_are_links_out_of_it_are_refused(run, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).symlink_to(outside)
    expected = "expected a path inside .*, got a link"
    with pytest.raises(InputError, match=expected) as caught:
        WRITES.get(name, lock)(run)
    assert str(run.path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(outside.iterdir())


def test_a_run_folder_may_itself_be_a_link_and_hold_links_within(run, tmp_path):
    (tmp_path / "latest").symlink_to(run.path)
    (run.path / "real").mkdir()
    (run.path / "evaluation").symlink_to("real")
    linked = Run.open(tmp_path / "latest")
    with linked.lock():
        assert linked.make_evaluation_dir().is_dir()


def test_what_a_killed_process_left_is_removed_and_other_names_stay(run):
    token = "0123456789abcdef"
    (run.path / f".policy.{token}.new").mkdir()
    (run.path / f".metrics.csv.{token}.new").touch()
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / f".iter_000002.{token}.new").mkdir()
    (run.path / ".mine.new").touch()
    lock(run)
    names = {path.name for path in run.path.rglob("*")}
    assert names == {"config.yaml", ".lock", "checkpoints", ".mine.new"}


@pytest.mark.parametrize("write", [lock, Run.make_evaluation_dir])
def test_a_read_only_disk_is_one_line(run, monkeypatch, write):
    original = os.open

    def read_only(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system", str(path))
        return original(path, flags, *arguments, **options)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(InputError, match="Read-only file system") as caught:
        write(run)
    assert str(run.path) in str(caught.value)


# Metrics


@pytest.fixture
def logged_run(run, no_events):
    for iteration in range(1, 6):
        run.log({"iteration": iteration, "loss": iteration / 10, "=kl": 0.5})
        if iteration == 4:
            save(run, 4)
    return run


def test_what_was_logged_after_the_checkpoint_may_be_anything(logged_run):
    with logged_run.metrics_path.open("ab") as out:
        out.write(b"6,\x00\xff\xfe" + b"\x00" * 4096)
    reopened = Run.open(logged_run.path)
    assert reopened.metrics_problem() == ""
    assert reopened.resume_at(4) == ""
    assert [row["iteration"] for row in reopened.rows()] == [1, 2, 3, 4]
    assert reopened.saved() == {"iteration": 4, "loss": 0.4, "=kl": 0.5}


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old, new)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], str, list[int]]] = {
    "deleted": (lambda text: None, "is missing", []),
    "emptied": (lambda text: b"", "was cut", []),
    "cut": (lambda text: text[: text.index(b"3,0.3")], "was cut", [1, 2]),
    "a digit": (replaced(b"3,0.3", b"3,1.3"), "checksum", [1, 2, 3, 4]),
    "a byte": (replaced(b"2,0.2", b"2,\xff.2"), "1 lines that cannot be", [1, 3, 4]),
    "a number": (replaced(b"2,0.2", b"2,0x2"), "checksum", [1, 3, 4]),
    "a comma": (replaced(b"2,0.2,", b"2,0.2-"), "checksum", [1, 3, 4]),
    "a quote": (replaced(b"2,0.2", b'2,"0.2'), "checksum", [1]),
    "the header": (replaced(b"iteration", b"iterat\x00on"), "checksum", [1, 2, 3, 4]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_told_on_resume_and_kept_aside(logged_run, damage):
    change, reason, iterations = DAMAGES[damage]
    before = logged_run.metrics_path.read_bytes()
    content = change(before)
    logged_run.metrics_path.unlink()
    if content is not None:
        logged_run.metrics_path.write_bytes(content)
    run = Run.open(logged_run.path)
    assert run.metrics_problem()
    assert run.saved() == {"iteration": 4, "loss": 0.4, "=kl": 0.5}
    message = run.resume_at(4)
    assert reason in message
    assert "metrics.csv" in message
    assert "\n" not in message
    assert [row["iteration"] for row in run.rows()][: len(iterations)] == iterations
    run.log({"iteration": 5, "=kl": 1.5})
    assert run.rows()[-1]["=kl"] == 1.5
    aside = run.path / "metrics.damaged.csv"
    assert aside.exists() == ("kept in metrics.damaged.csv only" in message)
    assert not aside.exists() or aside.read_bytes() == content


def test_metrics_that_are_damaged_cannot_be_read_as_whole(logged_run):
    text = logged_run.metrics_path.read_text()
    logged_run.metrics_path.write_text(text.replace("2,0.2", "2,0x2"))
    with pytest.raises(InputError, match="is damaged: line 3: expected 3 numbers"):
        logged_run.rows()
    logged_run.metrics_path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="cannot be read"):
        logged_run.rows()
