"""Runs in storage: mirrored, fetched, resumed, evaluated from there."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from helpers.tables import yaml_cases
from helpers.wind_env import WINDY
from marl_pool import InputError
from marl_pool.cli.main import main
from marl_pool.files import atomic
from marl_pool.runs import mirror as module
from marl_pool.runs.mirrored import (
    OF_SESSION,
    mirror_of,
    mirrored,
    restore,
    restore_proposals,
    restore_sweep,
    validate_new,
)
from marl_pool.runs.run import LOCK, Run
from marl_pool.runs.sweep import PROPOSALS, Proposal, Sweep
from marl_pool.training.jobs import JOBS

CONFIG = {"env": {"name": "simple_centroid"}, "seed": 3, "storage": "memory://store"}
STORE = CONFIG["storage"]
SMALL = (*WINDY, "total_generations=4")
PLUG_IN = ("--plugin", "helpers.wind_env:WindEnv")


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch) -> Iterator[None]:
    """A working folder, a cache and an in-memory storage for one test."""
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    fsspec.filesystem("memory").store.clear()


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def save(run: Run, iteration: int) -> None:
    """Log and save an iteration, as a training run does."""
    run.log({"iteration": iteration, "loss": 1 / iteration})
    with run.checkpoint(iteration) as folder:
        (folder / "state").write_text(str(iteration))
    run.on_saved()


@pytest.fixture
def run(workspace) -> Iterator[Run]:
    run = Run.create("runs/a", CONFIG)
    yield run
    run.close()


@pytest.fixture
def saved(run) -> Run:
    """A run whose first checkpoint is mirrored."""
    with mirrored(run, STORE):
        save(run, 1)
    return run


def test_a_run_is_mirrored_after_each_checkpoint_and_at_the_end(run, tmp_path):
    with run.lock(), mirrored(run, STORE):
        save(run, 1)
        restore(tmp_path / "first" / "a", STORE)
        run.log({"iteration": 2, "loss": 0.5})
    restore(tmp_path / "last" / "a", STORE)
    after_checkpoint, at_end = (
        Run.open(tmp_path / name / "a") for name in ("first", "last")
    )
    assert [row["iteration"] for row in after_checkpoint.rows()] == [1]
    assert [row["iteration"] for row in at_end.rows()] == [1, 2]
    assert after_checkpoint.latest_checkpoint().name == at_end.latest_checkpoint().name
    assert at_end.config == CONFIG


def test_a_failing_upload_warns_and_training_continues(run, capsys, monkeypatch):
    def put(*args):
        raise PermissionError("Access Denied")

    with run.lock(), mirrored(run, STORE) as mirror:
        with monkeypatch.context() as patch:
            patch.setattr(mirror.fs, "put_file", put)
            save(run, 1)
            (line,) = capsys.readouterr().err.splitlines()
            for text in ("iter_000001", "memory://store/a", "Access Denied"):
                assert text in line
        save(run, 2)
    assert capsys.readouterr().err == ""
    assert mirror.problem == ""
    saved = {f"checkpoints/iter_00000{i}/manifest.json" for i in (1, 2)}
    assert saved <= mirror.list()


def test_a_run_that_could_not_begin_leaves_nothing(run):
    with pytest.raises(InputError, match="no such env"), mirrored(run, STORE) as mirror:
        raise InputError("no such env")
    assert mirror.list() == set()


def test_an_older_copy_does_not_replace_the_newer_mirror(run, tmp_path):
    with mirrored(run, STORE):
        save(run, 1)
        shutil.copytree(run.path, tmp_path / "old" / "a")
        save(run, 2)
    old = Run.open(tmp_path / "old" / "a")
    with pytest.raises(InputError, match="without iteration 2.*memory://store/a"):
        mirrored(old, STORE).__enter__()
    # It is brought up to date, then continues.
    restore(old.path, STORE)
    assert old.latest_checkpoint().name == "iter_000002"
    with mirrored(old, STORE):
        save(old, 3)
    restore(run.path, STORE)
    assert run.latest_checkpoint().name == "iter_000003"
    old.close()


def test_whenever_the_download_of_further_iterations_ends_no_row_is_lost(saved):
    copies = []
    for calls in range(20):
        shutil.copytree(saved.path, f"copy_{calls}/a")
        copies.append(Path(f"copy_{calls}/a"))
    with mirrored(saved, STORE):
        save(saved, 2)
        save(saved, 3)
    for calls, copy in enumerate(copies):
        numbers, get = iter(range(calls)), module.Mirror._get

        def counted(*args, get=get, numbers=numbers):
            if next(numbers, None) is None:
                raise KeyboardInterrupt
            get(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Mirror, "_get", counted)
            with contextlib.suppress(KeyboardInterrupt):
                restore(copy, STORE)
        restore(copy, STORE)
        run = Run.open(copy)
        assert run.latest_checkpoint().name == "iter_000003"
        assert [row["iteration"] for row in run.rows()] == [1, 2, 3]
    assert next(numbers, None) is not None  # the last download was complete


@pytest.mark.usefixtures("saved")
def test_a_long_download_is_announced(tmp_path, capsys, monkeypatch):
    restore(tmp_path / "quick" / "a", STORE)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    restore(tmp_path / "slow" / "a", STORE)
    first = capsys.readouterr().err.splitlines()[0]
    assert "fetching memory://store/a" in first
    assert first.endswith(" MB")


def test_a_sweep_without_its_folder_is_fetched(tmp_path):
    sweep = Sweep("sweeps/heads", {"seed": [0, 1]}, ["pooling=max"])
    with sweep.lock():
        sweep.write()
    mirror_of(sweep.path, STORE).update()
    for folder in (tmp_path / "new" / "heads", tmp_path / "new" / "others"):
        restore_sweep(folder, STORE)
    assert Sweep.open(tmp_path / "new" / "heads").grid == sweep.grid
    assert not (tmp_path / "new" / "others").exists()
    # A folder that is there stays as it is.
    sweep.grid = {"seed": [5]}
    sweep.write()
    restore_sweep(sweep.path, STORE)
    assert Sweep.open(sweep.path).grid == {"seed": [5]}


@pytest.fixture
def search(workspace) -> Sweep:
    """A search with a mirror and one proposal."""
    sweep = Sweep("sweeps/a", {}, [], space={"ppo.lr": ["uniform", 0, 1]})
    sweep.mirror = mirror_of(sweep.path, STORE)
    with sweep.lock():
        sweep.write()
    sweep.write_proposals([Proposal({"ppo.lr": 0.5})])
    return sweep


def test_what_another_machine_has_proposed_is_fetched(search, tmp_path):
    restore_sweep(tmp_path / "new" / "a", STORE)
    restored = Sweep.open(tmp_path / "new" / "a")
    # The other machine continues.
    proposals = [*search.proposals(), Proposal({"ppo.lr": 0.25})]
    proposals[0].stopped_early = True
    search.write_proposals(proposals)
    mirror = mirror_of(restored.path, STORE)
    with restored.lock(), pytest.raises(InputError, match="another process is running"):
        restore_proposals(restored, mirror)
    restore_proposals(restored, mirror)
    assert restored.proposals() == proposals
    # A mirror that lags behind takes nothing away.
    restored.write_proposals([*proposals, Proposal({"ppo.lr": 1.0})])
    restore_proposals(restored, mirror)
    assert len(restored.proposals()) == 3


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (0.75, ["memory://store/a", "trial 0000 {'ppo.lr': 0.75}", "0.5}"]),
        (7.5, ["memory://store/a/proposals.yaml: ppo.lr: expected", "got 7.5"]),
    ],
)
def test_proposals_of_another_search_are_left_alone(search, tmp_path, value, parts):
    restore_sweep(tmp_path / "new" / "a", STORE)
    restored = Sweep.open(tmp_path / "new" / "a")
    search.write_proposals([Proposal({"ppo.lr": value}), Proposal({"ppo.lr": 0.25})])
    with pytest.raises(InputError) as caught:
        restore_proposals(restored, mirror_of(restored.path, STORE))
    for part in ("storage: ", *parts):
        assert part in str(caught.value)
    assert restored.proposals() == [Proposal({"ppo.lr": 0.5})]


def test_an_up_to_date_copy_is_not_replaced(saved):
    save(saved, 2)
    before = files(saved.path)
    restore(saved.path, STORE)
    assert files(saved.path) == before


@pytest.mark.usefixtures("saved")
def test_a_namesake_is_left_alone(tmp_path):
    other = {**CONFIG, "env": {"name": "simple_tag"}}
    namesake = Run.create(tmp_path / "other" / "a", other)
    before = files(namesake.path)
    expected = "got another: env.name: expected 'simple_tag', got 'simple_centroid'$"
    with pytest.raises(InputError, match=expected):
        restore(namesake.path, STORE)
    with pytest.raises(InputError, match=expected), mirrored(namesake, STORE):
        pytest.fail("it was mirrored")
    assert files(namesake.path) == before


def test_an_edited_run_is_mirrored_on(saved, tmp_path):
    saved.write_config({**CONFIG, "seed": 4})
    restore(saved.path, STORE)
    with mirrored(saved, STORE):
        save(saved, 2)
    restore(tmp_path / "copy" / "a", STORE)
    assert Run.open(tmp_path / "copy" / "a").config["seed"] == 4


@pytest.mark.usefixtures("saved")
def test_a_run_that_is_being_trained_is_not_fetched_into(tmp_path):
    target = Run.create(tmp_path / "other" / "a", CONFIG)
    with target.lock(), pytest.raises(InputError, match="another process is training"):
        restore(target.path, STORE)


@pytest.mark.usefixtures("saved")
def test_two_processes_fetch_a_run_once(tmp_path):
    folder = tmp_path / "other" / "a"
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool, atomic.locked(folder / LOCK, None):
        second = pool.submit(restore, folder, STORE)
        restore_unlocked = tmp_path / "first" / "a"
        restore(restore_unlocked, STORE)
        for item in restore_unlocked.iterdir():
            if item.name != LOCK:
                item.rename(folder / item.name)
        (folder / "mark").write_text("mine")
    second.result()
    # What the first has fetched, and perhaps continued, is not replaced.
    assert (folder / "mark").read_text() == "mine"


@pytest.mark.usefixtures("saved")
def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "other" / "a").mkdir(parents=True)
    (tmp_path / "other" / "a" / "metrics.csv").write_text("mine")
    with pytest.raises(InputError, match="memory://store/a, got one with other files"):
        restore(tmp_path / "other" / "a", STORE)
    assert files(tmp_path / "other" / "a") == {"metrics.csv": b"mine"}


def test_what_a_resume_may_change_does_not_make_another_run():
    controls = {key for job in JOBS.values() for key in job.controls}
    # Comparisons leave out the number of processes, an option of some environments.
    assert controls - {"env.workers"} <= OF_SESSION


# The command line


@pytest.fixture(scope="module")
def evolved_storage(tmp_path_factory) -> Path:
    """A storage with a run whose local folder is gone."""
    base = tmp_path_factory.mktemp("evolved")
    flags = ["--run-dir", str(base / "a"), "--storage", f"file://{base}/store"]
    assert main(["evolve", *SMALL, *flags]) == 0
    shutil.rmtree(base / "a")
    return base / "store"


@pytest.fixture
def url(evolved_storage, tmp_path) -> str:
    shutil.copytree(evolved_storage, tmp_path / "store")
    return f"file://{tmp_path}/store/a"


def test_a_run_is_resumed_from_its_url_and_mirrored_again(url, tmp_path, capsys):
    assert main(["resume", url, *PLUG_IN]) == 0
    assert "4 of 4 generations are done" in capsys.readouterr().out
    assert main(["resume", url, *PLUG_IN, "total_generations=6"]) == 0
    assert len(Run.open("runs/a").rows()) == 6
    Path("runs/a/.lock").unlink()
    assert files(Path("runs/a")) == files(tmp_path / "store" / "a")
    # A local run remembers its storage.
    assert main(["resume", "runs/a", *PLUG_IN, "total_generations=8"]) == 0
    assert files(tmp_path / "store" / "a")["metrics.csv"].count(b"\n") == 9


def test_the_same_command_starts_or_resumes_a_run(url, capsys, refused):
    store = url.removesuffix("/a")
    command = ("evolve", *SMALL, "--or-resume")
    stored = (*command, "--run-dir", "jobs/a", "--storage", store)
    # On an empty disk it goes on from the storage, and then from the disk.
    for generations in (6, 8):
        assert main([*stored, f"total_generations={generations}"]) == 0
        assert len(Run.open("jobs/a").rows()) == generations
    assert main(stored) == 0
    assert "8 of 4 generations are done" in capsys.readouterr().out
    # A new name starts a new run.
    local = (*command, "--run-dir", "jobs/b")
    assert main([*local, "total_generations=1"]) == 0
    for words in (stored, local):
        assert "seed: expected 7, got 0" in refused(*words, "seed=7")
    assert "expected --run-dir DIR, the folder of the run" in refused(*command)


def test_a_run_is_evaluated_and_reported_from_its_url(url, tmp_path, capsys):
    options = ("episodes=2", "threads=1", "suite=quick")
    assert main(["evaluate", url, *PLUG_IN, *options]) == 0
    # The results are in the storage too, where the report finds them.
    assert (tmp_path / "store" / "a" / "evaluation" / "results.csv").is_file()
    shutil.rmtree(tmp_path / "cache")
    assert main(["report", url, *PLUG_IN, "--out", "page.html", "videos=false"]) == 0
    assert ">a<" in Path("page.html").read_text()
    assert sorted(os.listdir()) == ["cache", "page.html", "store"]


def test_results_that_cannot_be_uploaded_are_kept(url, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module.Mirror, "_put", lambda *args: 1 / 0)
    options = ("episodes=2", "threads=1", "suite=quick")
    assert main(["evaluate", url, *PLUG_IN, *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "evaluation/results.csv" in line
    assert url in line
    assert Path(line.rpartition(" ")[2], "evaluation", "results.csv").is_file()


@yaml_cases("storage, message")
def test_a_wrong_storage_is_one_line(url, tmp_path, refused, storage, message):
    """Before training begins."""
    (tmp_path / "file").touch()
    name = "a" if storage.endswith("store") else "b"
    path = tmp_path / "here" / name
    flags = ["--run-dir", str(path), "--storage", storage.format(here=tmp_path)]
    line = refused("evolve", *SMALL, *flags)
    assert line.startswith("marl-pool: storage: ")
    assert message.format(here=tmp_path) in line
    assert not path.exists()


def test_a_url_without_a_run_is_one_line(tmp_path, refused):
    url = f"file://{tmp_path}/nothing"
    for verb in ("resume", "evaluate", "report", "render", "diagnose"):
        line = refused(verb, url)
        assert f"{url}: expected a run" in line
        assert "got no config.yaml" in line


def test_a_mirror_that_lacks_something_is_the_last_line(tmp_path, capsys, monkeypatch):
    # The storage is there when the training begins, and fails from then on.
    monkeypatch.setattr(module.Mirror, "_put", lambda *args: 1 / 0)
    flags = ("--run-dir", "runs/a", "--storage", f"file://{tmp_path}/store")
    assert main(["evolve", *SMALL, *flags]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    for text in ("not mirrored to", "store/a", "checkpoints/iter_000002", "division"):
        assert text in line
    # Another attempt sends all of it, though no training is left.
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "runs/a", *PLUG_IN]) == 0
    assert Path("store/a/checkpoints/iter_000004/manifest.json").is_file()


def test_new_sweep_does_not_adopt_proposals_alone(tmp_path):
    # The process of a search may end before its other file has arrived.
    folder = tmp_path / "search"
    mirror = mirror_of(folder, STORE)
    fsspec.filesystem("memory").pipe_file(f"{mirror.url}/{PROPOSALS}", b"trials: []")
    expected = f"storage: expected nothing at {mirror.url} yet, got a {PROPOSALS}; to "
    with pytest.raises(InputError, match=re.escape(expected)):
        validate_new(folder, STORE)
