"""Mirrors of folders on file systems of fsspec: in memory, on a disk, on S3."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from marl_pool.files import atomic
from marl_pool.files.manifest import problem_of, write_manifest
from marl_pool.runs import mirror as module
from marl_pool.runs.mirror import Mirror
from marl_pool.utils.errors import InputError

CALLS = ("put_file", "cp_file", "rm_file", "rm", "mv")
"""Calls that change a file system."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    # Whether files survive a power cut is tested in tests/files.
    monkeypatch.setattr(atomic, "sync", lambda path: None)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store/run"
        return
    yield "memory://store/run"
    fsspec.filesystem("memory").store.clear()


def write(folder: Path, **files: str) -> None:
    """Replace a folder with a manifest, as checkpoints and policies are."""
    with atomic.new_folder(folder) as new:
        for name, text in files.items():
            (new / name).write_text(text)
        write_manifest(new)


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder with two checkpoints."""
    folder = tmp_path / "run"
    write(folder / "checkpoints" / "iter_000001", state="1")
    write(folder / "checkpoints" / "iter_000002", state="2", more="2")
    write(folder / "policy", weights="first")
    (folder / "config.yaml").write_text("seed: 1")
    (folder / "metrics.csv").write_text("iteration\n1\n2\n")
    return folder


@pytest.mark.parametrize(
    "name", ["evaluation/...old", "evaluation/.mine.old", ".a/.b.old", "x/....old"]
)
def test_a_crafted_mirror_replaces_no_local_results(run, tmp_path, name):
    """Only folders that change as a whole are set aside."""
    Mirror(run, f"file://{tmp_path}/store/run").update()
    crafted = tmp_path / "store" / "run" / name
    crafted.mkdir(parents=True)
    (crafted / "results.csv").write_text("theirs")
    write_manifest(crafted)
    local = tmp_path / "other"
    (local / "evaluation").mkdir(parents=True)
    (local / "evaluation" / "mine.csv").write_text("mine")
    Mirror(local, f"file://{tmp_path}/store/run").fetch()
    assert (local / "evaluation" / "mine.csv").read_text() == "mine"
    assert {*tree(local)} == {*tree(run), "evaluation/mine.csv"}


UNKNOWN = (
    *("setup.py", "notes.txt", "config.yaml.bak", "evil/config.yaml", "policy.pkl"),
    *("evaluation/run.py", "evaluation/a/results.csv", "videos/clean.html"),
    *("checkpoints/state", "checkpoints/best/state", "trajectories/x/about.json"),
    *("x/policy/weights", "wandb/settings", f"checkpoints/iter_{'9' * 40}/state"),
)
"""Names that no run has."""


def test_names_that_no_run_has_stay_in_the_mirror(run, tmp_path, capsys):
    url = f"file://{tmp_path}/store/run"
    Mirror(run, url).update()
    for name in UNKNOWN:
        crafted = tmp_path / "store" / "run" / name
        crafted.parent.mkdir(parents=True, exist_ok=True)
        crafted.write_text("theirs")
    assert fetched_tree(url, tmp_path / "copy") == tree(run)
    prefix = f"marl-pool: {url}: not fetched, as runs have no such files: "
    names = ", ".join(sorted(UNKNOWN)[:3])
    expected = f"{prefix}{names} and {len(UNKNOWN) - 3} more\n"
    assert capsys.readouterr().err == expected


ORDINARY = (
    *("error.txt", "results.json", "sweep.yaml", "proposals.yaml", "table.csv"),
    *("metrics.damaged.csv", "metrics.damaged-2.csv", "data/knn/train.npz"),
    "events.out.tfevents.1795711731.vm-1.example.1.bf1106a2",
    *("evaluation/results-2.csv", "evaluation/returns.npz", "videos/clean-3.webm"),
    *("networks/fold_12.safetensors", "networks/manifest.json"),
    *("pictures/policies.png", "teacher/config.json"),
    *("checkpoints/iter_1234567/state", "trajectories/round_010/about.json"),
)


def test_every_file_of_a_run_is_fetched(run, tmp_path, capsys):
    for name in ORDINARY:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
        if name.split("/")[0] in ("teacher", "checkpoints", "trajectories"):
            write_manifest((run / name).parent)
    url = f"file://{tmp_path}/store/run"
    Mirror(run, url).update()
    assert {*ORDINARY} <= tree(run).keys()
    assert fetched_tree(url, tmp_path / "copy") == tree(run)
    assert capsys.readouterr().err == ""


def train_further(run: Path) -> None:
    """Save another checkpoint and a better policy, and remove the oldest."""
    (run / "metrics.csv").write_text("iteration\n1\n2\n3\n")
    write(run / "checkpoints" / "iter_000003", state="3")
    write(run / "policy", weights="second")
    shutil.rmtree(run / "checkpoints" / "iter_000001")


def fetched_tree(url: str, folder: Path) -> dict[str, str]:
    Mirror(folder, url).fetch()
    return tree(folder)


def test_a_mirror_has_what_the_folder_has(run, url, tmp_path):
    mirror, copy = Mirror(run, url), Mirror(tmp_path / "copy", url)
    assert mirror.list() == set()
    assert mirror.update()
    assert mirror.list() == {*tree(run)}
    copy.fetch()
    assert tree(copy.folder) == tree(run)
    train_further(run)
    assert mirror.update()
    assert mirror.list() == {*tree(run)}
    assert fetched_tree(url, tmp_path / "other") == tree(run)
    # An exact copy drops checkpoints that are no longer in the mirror.
    copy.fetch(exact=True)
    assert tree(copy.folder) == tree(run)


@pytest.mark.parametrize("name", ["a[1]", "a?", "*", "lr=[1,2],seed=0"])
def test_a_name_with_brackets_or_stars_is_no_pattern(run, url, tmp_path, name):
    store, other = url.removesuffix("run"), Mirror(run, url.removesuffix("run") + "a1")
    shutil.copytree(run, tmp_path / name)
    mirror = Mirror(tmp_path / name, store + name)
    assert other.update()
    assert mirror.update()
    before = fetched_tree(other.url, tmp_path / "before")
    train_further(mirror.folder)
    assert mirror.update()
    assert mirror.list() == {*tree(mirror.folder)}
    assert fetched_tree(mirror.url, tmp_path / "copy") == tree(mirror.folder)
    assert fetched_tree(other.url, tmp_path / "after") == before == tree(run)


def test_hidden_files_and_links_are_not_mirrored(run, url, tmp_path):
    expected = tree(run)
    (run / ".lock").touch()
    (run / ".iter_000003.0123456789abcdef.new").mkdir()
    (run / ".iter_000003.0123456789abcdef.new" / "state").touch()
    (tmp_path / "secret").write_text("mine")
    (run / "secret").symlink_to(tmp_path / "secret")
    (run / "evaluation").symlink_to(tmp_path)
    mirror = Mirror(run, url)
    assert mirror.update()
    assert mirror.list() == {*expected}


def test_only_what_changed_is_sent(run, url, monkeypatch):
    mirror, sent = Mirror(run, url), []
    assert mirror.update()
    put = mirror._put
    monkeypatch.setattr(mirror, "_put", lambda name: sent.append(name) or put(name))
    assert mirror.update()
    assert sent == []
    train_further(run)
    assert mirror.update()
    names = (f"checkpoints/iter_000003/{n}" for n in ("state", "manifest.json"))
    assert sent == ["metrics.csv", *names, "policy/weights", "policy/manifest.json"]
    # Another session sends no whole checkpoint again.
    mirror = Mirror(run, url)
    sent.clear()
    monkeypatch.setattr(mirror, "_put", sent.append)
    assert mirror.update()
    assert sorted(sent) == ["config.yaml", "metrics.csv"]


class PowerCut(BaseException):
    """A simulated end of the process."""


def cut_after(mirror: Mirror, calls: int, monkeypatch) -> None:
    """Simulate the end of a mirror's process before its call number ``calls``."""
    remaining = iter(range(calls))

    def counted(call):
        def wrapper(*args, **kwargs):
            if next(remaining, None) is None:
                raise PowerCut
            return call(*args, **kwargs)

        return wrapper

    for name in CALLS:
        monkeypatch.setattr(mirror.fs, name, counted(getattr(mirror.fs, name)))


def test_whenever_an_upload_ends_the_mirror_is_intact(run, url, tmp_path):
    mirror = Mirror(run, url)
    assert mirror.update()
    before = tree(run)
    train_further(run)
    after, calls, done = tree(run), 0, False
    while not done:
        # Upload in another process, which ends after some calls.
        with pytest.MonkeyPatch.context() as patch:
            interrupted = Mirror(run, url)
            cut_after(interrupted, calls, patch)
            try:
                done = interrupted.update()
            except PowerCut:
                calls += 1
        # Each folder is complete, and the policy is the old or the new one.
        copy = tmp_path / f"copy_{calls}"
        content = fetched_tree(url, copy)
        assert content["policy/weights"] in ("first", "second")
        assert "checkpoints/iter_000002/manifest.json" in content
        for manifest in copy.rglob("manifest.json"):
            assert problem_of(manifest.parent) == ""
        for name, text in content.items():
            assert text in (before.get(name), after.get(name)), name
        # Begin the next attempt with the old state.
        if not done:
            shutil.rmtree(tmp_path / "old", ignore_errors=True)
            shutil.copytree(run, tmp_path / "old")
            shutil.rmtree(tmp_path / "old" / "checkpoints" / "iter_000003")
            write(tmp_path / "old" / "checkpoints" / "iter_000001", state="1")
            write(tmp_path / "old" / "policy", weights="first")
            (tmp_path / "old" / "metrics.csv").write_text(before["metrics.csv"])
            assert Mirror(tmp_path / "old", url).update()
    assert calls > 10
    assert fetched_tree(url, tmp_path / "last") == after
    assert interrupted.list() == {*after}


@pytest.mark.parametrize("transfer", ["_put", "_get"])
def test_that_a_fit_is_finished_comes_after_its_networks(
    run, url, tmp_path, monkeypatch, transfer
):
    (run / "networks").mkdir()
    for name in ("networks/fold_0.safetensors", "networks/manifest.json"):
        (run / name).write_text("{}")
    (run / "results.json").write_text("{}")
    names, original = [], getattr(Mirror, transfer)

    def noted(mirror, name, *target):
        names.append(name)
        original(mirror, name, *target)

    monkeypatch.setattr(Mirror, transfer, noted)
    assert Mirror(run, url).update()
    if transfer == "_get":
        Mirror(tmp_path / "copy", url).fetch()
    single = [name for name in names if not name.startswith(("checkpoints", "policy"))]
    assert single == [
        *("metrics.csv", "networks/fold_0.safetensors", "networks/manifest.json"),
        *("results.json", "config.yaml"),
    ]


def test_what_the_mirror_lacks_is_sent_after_a_download(run, url):
    mirror = Mirror(run, url)
    assert mirror.update()
    (run / "evaluation").mkdir()
    (run / "evaluation" / "results.json").write_text("{}")
    mirror.fetch()
    assert mirror.update()
    assert "evaluation/results.json" in mirror.list()


def test_whenever_a_download_ends_a_run_is_intact_or_none(run, url, tmp_path):
    """A folder with a ``config.yaml`` is a run."""
    mirror = Mirror(run, url)
    assert mirror.update()
    for calls in range(len(tree(run)) + 1):
        copy = tmp_path / f"copy_{calls}"
        interrupted, numbers = Mirror(copy, url), iter(range(calls))
        get = interrupted.fs.get_file

        def counted(*args, get=get, numbers=numbers, **kwargs):
            if next(numbers, None) is None:
                raise PowerCut
            return get(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interrupted.fs, "get_file", counted)
            with contextlib.suppress(PowerCut):
                interrupted.fetch()
        if (copy / "config.yaml").exists():
            assert tree(copy) == tree(run)
    assert (copy / "config.yaml").exists()


def test_a_failing_upload_is_tried_again_and_then_described(run, url, monkeypatch):
    mirror, calls = Mirror(run, url), []

    def put(*args):
        calls.append(args)
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(mirror.fs, "put_file", put)
        assert not mirror.update()
    assert len(calls) == module.ATTEMPTS
    for text in (url, "checkpoints/iter_000001", "and 2 more", "Access Denied"):
        assert text in mirror.problem
    assert mirror.update()
    assert mirror.problem == ""
    assert mirror.list() == {*tree(run)}


def test_results_are_never_replaced(run, url, tmp_path):
    assert Mirror(run, url).update()
    first, second = Mirror(tmp_path / "one", url), Mirror(tmp_path / "other", url)
    for name, mirror in (("one", first), ("other", second)):
        mirror.fetch()
        (mirror.folder / "evaluation").mkdir()
        (mirror.folder / "evaluation" / "results.csv").write_text(name)
    assert first.update(("evaluation",))
    assert not second.update(("evaluation",))
    assert "evaluation/results.csv" in second.problem
    second.fetch()
    assert (second.folder / "evaluation" / "results.csv").read_text() == "other"
    # Training continues, and everything else is uploaded.
    (run / "evaluation").mkdir()
    (run / "evaluation" / "results.csv").write_text("run")
    assert Mirror(run, url).update()
    assert fetched_tree(url, tmp_path / "copy")["evaluation/results.csv"] == "one"


def test_a_damaged_checkpoint_is_fetched_and_found(run, url, tmp_path):
    mirror = Mirror(run, url)
    assert mirror.update()
    mirror.fs.pipe_file(f"{mirror.root}/checkpoints/iter_000002/state", b"3")
    Mirror(tmp_path / "copy", url).fetch()
    damaged, intact = (f"copy/checkpoints/iter_00000{i}" for i in (2, 1))
    assert "state has changed" in problem_of(tmp_path / damaged)
    assert problem_of(tmp_path / intact) == ""


def test_names_that_lead_out_of_the_folder_are_refused(run, url, tmp_path, monkeypatch):
    mirror = Mirror(tmp_path / "copy", url)
    evil = f"{mirror.root}/checkpoints/../../../evil"
    monkeypatch.setattr(mirror.fs, "find", lambda root: [evil])
    with pytest.raises(InputError, match="expected names of files, got 'checkpoints"):
        mirror.fetch()
    assert not (tmp_path / "evil").exists()


def test_nothing_is_fetched_through_a_link(run, url, tmp_path):
    assert Mirror(run, url).update()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "policy").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="got a link to"):
        Mirror(tmp_path / "copy", url).fetch()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_package_that_is_missing_is_one_line(tmp_path, monkeypatch):
    missing = {"class": "nowhere.Dropbox", "err": "no package"}
    monkeypatch.setitem(known_implementations, "dropbox", missing)
    with pytest.raises(InputError, match="storage: dropbox://x: no package"):
        Mirror(tmp_path, "dropbox://x")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_mirror_on_s3(run, tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "mine")
    mirror = Mirror(run, "s3://bucket/runs/run")
    with pytest.raises(InputError, match="bucket does not exist"):
        mirror.probe()
    mirror.fs.mkdir("bucket")
    mirror.probe()
    # The other run's name begins with this one's.
    assert Mirror(run, "s3://bucket/runs/run2").update()
    assert mirror.list() == set()
    assert mirror.update()
    assert fetched_tree(mirror.url, tmp_path / "copy") == tree(run)
    train_further(run)
    assert mirror.update()
    assert mirror.list() == {*tree(run)}
    assert fetched_tree(mirror.url, tmp_path / "other") == tree(run)
    server.stop()
