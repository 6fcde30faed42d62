"""Run folders: nothing is overwritten; a crash leaves the old or the new state."""

import errno
import io
import math
import os
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.training import run_python
from marl_pool import InputError, __version__
from marl_pool.files import atomic
from marl_pool.runs import metrics
from marl_pool.runs import run as runs
from marl_pool.runs.run import Best, Run, _TolerantFile, default_path, iteration_of
from marl_pool.training.errors import checkpoint_to_resume, trim_log
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.progress import Progress, duration

CONFIG = {"env": {"name": "simple_centroid"}, "lr": 1e-05, "seed": 3, "limit": None}


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "a" / "run", CONFIG)
    yield run
    run.close()


def fill(run: Run, *iterations: int) -> None:
    for iteration in iterations:
        with run.checkpoint(iteration) as folder:
            (folder / "policy").mkdir()
            (folder / "policy" / "config.json").write_text(str(iteration))


# Creating and opening


def test_a_run_reads_back_its_config_and_version(run):
    assert repr(run) == f"Run({str(run.path)!r})"
    text = (run.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == {**CONFIG, "package_version": __version__}
    assert text.index("env:") < text.index("seed:") < text.index(runs.VERSION)
    copy = Run.open(run.path)
    assert copy.config == CONFIG
    assert copy.version == __version__
    copy.write_config({**CONFIG, "seed": 4})
    assert Run.open(run.path).config["seed"] == 4


def test_an_existing_run_is_not_clobbered(run):
    before = (run.path / "config.yaml").read_bytes()
    expected = "run: expected a new or empty folder .*`marl-pool resume .*run`"
    with pytest.raises(InputError, match=expected):
        Run.create(run.path, {"seed": 9})
    assert (run.path / "config.yaml").read_bytes() == before


def test_an_empty_folder_becomes_a_run_and_a_file_does_not(tmp_path):
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path / "empty", CONFIG).config == CONFIG
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="cannot be made"):
            Run.create(path, CONFIG)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = Run.create("~/runs/a", CONFIG)
    assert run.path == tmp_path / "home" / "runs" / "a"
    assert Run.open("~/runs/a").config == CONFIG
    assert os.listdir() == ["home"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no run folder: it has no config.yaml"),
        (b"", "is truncated, or not written by marl_pool"),
        (b"seed: 3\n", "is truncated, or not written by marl_pool"),
        (b"- 3\n", "is truncated, or not written by marl_pool"),
        (b"seed: [3\n", "cannot be read: line 2, column 1: expected"),
        (b"\xff\xfe\x00", "cannot be read: "),
    ],
)
def test_a_broken_config_is_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        Run.open(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such run folder"):
        Run.open(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: expected a run folder, got a file"):
        Run.open(tmp_path / "file")


@given(st.data())
def test_a_truncated_config_is_never_read(tmp_path_factory, data):
    run = Run.create(tmp_path_factory.mktemp("run"), CONFIG)
    text = (run.path / "config.yaml").read_text()
    last = text.index("package_version") + len("package_version: ")
    cut = data.draw(st.integers(0, last))
    (run.path / "config.yaml").write_text(text[:cut])
    with pytest.raises(InputError):
        Run.open(run.path)


def test_only_a_run_that_wrote_nothing_is_discarded(run):
    with run.lock():
        pass
    fill(run, 1)
    run.discard_if_unused()
    assert run.checkpoints()
    unused = Run.create(run.path.parent / "other", CONFIG)
    with unused.lock():
        pass
    with unused.lock():
        # Another process trains it: there is no waiting, and nothing is removed.
        Run.open(unused.path).discard_if_unused()
        assert unused.path.exists()
    unused.discard_if_unused()
    assert not unused.path.exists()


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"pooling": {"name": "a.b:My"}, "policy": {"name": "token"}}, "My"),
        ({"policy": {"name": "sensory"}}, "sensory"),
    ],
)
def test_default_path_names_env_pooling_or_policy_and_seed(parts, name):
    path = default_path({"env": {"name": "cartpole"}, **parts, "seed": 5})
    assert path.parent.name == "runs"
    assert path.name.endswith(f"-cartpole-{name}-s5")


# Locking


def test_two_processes_cannot_train_one_run(run):
    lock = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | 4)"
    refusal = pytest.raises(InputError, match="another process is training this run")
    with run.lock():
        result = run_python("-ISc", lock, run.path / runs.LOCK)
        assert "BlockingIOError" in result.stderr
        with refusal, Run.open(run.path).lock():
            pytest.fail("it was held twice")
    with Run.open(run.path).lock():
        pass


# Metrics


@given(st.lists(st.floats() | st.integers(-(2**60), 2**60), max_size=5))
def test_metrics_read_back_as_they_were_logged(tmp_path_factory, values):
    run = Run.create(tmp_path_factory.mktemp("run"), CONFIG)
    run._events = Mock()
    for iteration, value in enumerate(values):
        run.log({"iteration": iteration, "value": value})
    rows = run.rows()
    assert [row["iteration"] for row in rows] == list(range(len(values)))
    for row, value in zip(rows, values, strict=True):
        is_equal = row["value"] == value
        assert is_equal or (math.isnan(row["value"]) and math.isnan(value))


def test_a_row_may_omit_columns_and_add_some(run):
    run.log({"iteration": 1, "loss": 0.5, "kl": 0.1})
    run.log({"iteration": 2, "loss": 0.25})
    assert run.metrics_path.read_text() == "iteration,loss,kl\n1,0.5,0.1\n2,0.25,\n"
    assert math.isnan(run.rows()[1]["kl"])
    run.log({"iteration": 3, "a,b": 1.0, "loss": 0.5})
    lines = ['iteration,loss,kl,"a,b"', "1,0.5,0.1,", "2,0.25,,", "3,0.5,,1.0"]
    assert run.metrics_path.read_text().splitlines() == lines


def test_a_crash_after_new_columns_loses_no_row(run):
    run.log({"iteration": 1, "loss": 0.5})
    fill(run, 1)
    run.log({"iteration": 2, "loss": 0.25, "kl": 0.1})
    resumed = Run.open(run.path)
    assert resumed.metrics_problem() == resumed.resume_at(1) == ""
    resumed.log({"iteration": 2, "loss": 0.5, "kl": 0.2})
    resumed.close()
    assert [row["loss"] for row in resumed.rows()] == [0.5, 0.5]
    assert not list(run.path.glob("*.damaged.csv"))
    altered = run.metrics_path.read_text().replace("1,0.5,\n", "1,0.6,\n")
    run.metrics_path.write_text(altered)
    assert "its checksum differs" in Run.open(run.path).metrics_problem()


def test_rows_are_on_disk_at_once_and_a_cut_row_is_ignored(run):
    run.log({"iteration": 1, "loss": 0.5})
    with run.metrics_path.open("a") as out:
        out.write("2,0.1")
    assert Run.open(run.path).rows() == [{"iteration": 1, "loss": 0.5}]
    assert Run.create(run.path.parent / "new", CONFIG).rows() == []


def test_a_log_beyond_reason_is_not_read(run, monkeypatch):
    run.log({"iteration": 1, "loss": 0.5})
    monkeypatch.setattr(metrics, "MOST_BYTES", 10)
    expected = f"{run.metrics_path} cannot be read: expected at most 10 bytes, got more"
    with pytest.raises(InputError, match=f"^{expected}$"):
        run.rows()


@pytest.mark.parametrize(
    "text", [None, "iterat", "iteration\n", "iteration,loss\n", "loss\n", "\n"]
)
def test_a_log_without_rows_gets_the_columns_of_the_first(run, text):
    if text is not None:
        run.metrics_path.write_text(text)
    resumed = Run.open(run.path)
    resumed.resume_at(0)
    resumed.log({"iteration": 1, "kl": 0.5})
    resumed.close()
    assert resumed.rows() == [{"iteration": 1, "kl": 0.5}]


def test_a_crash_while_trimming_loses_no_row(run, monkeypatch):
    for iteration in (1, 2, 3):
        run.log({"iteration": iteration, "loss": 1.0})

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(atomic.os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        run.resume_at(1)
    assert len(run.rows()) == 3
    assert not list(run.path.glob(".metrics*"))


def test_resuming_drops_later_rows_and_events_and_continues(run):
    for iteration in (1, 2, 3):
        run.log({"iteration": iteration, "loss": float(iteration)})
    with run.metrics_path.open("a") as out:
        out.write("4,0.")
    run.close()
    resumed = Run.open(run.path)
    resumed.resume_at(2)
    resumed.log({"iteration": 3, "loss": 30.0})
    resumed.close()
    losses = [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(row["iteration"], row["loss"]) for row in resumed.rows()] == losses
    events = EventAccumulator(str(run.path))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == losses


# Checkpoints


def test_checkpoints_are_listed_by_iteration(run):
    assert run.latest_checkpoint() is None
    fill(run, 20, 1_000_000, 3)
    assert [iteration_of(path) for path in run.checkpoints()] == [3, 20, 1_000_000]
    assert run.latest_checkpoint().name == "iter_1000000"
    assert run.checkpoints()[0].name == "iter_000003"


def test_a_checkpoint_that_fails_leaves_nothing(run):
    fill(run, 1)

    def fail() -> None:
        with run.checkpoint(2) as folder:
            (folder / "half").touch()
            assert run.latest_checkpoint().name == "iter_000001"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    names = [path.name for path in (run.path / "checkpoints").iterdir()]
    assert names == ["iter_000001"]


def test_an_unfinished_checkpoint_is_ignored_and_pruned(run):
    fill(run, 1)
    (run.path / "checkpoints" / ".iter_000002.new").mkdir()
    assert iteration_of(run.latest_checkpoint()) == 1
    run.prune(1)
    assert not list((run.path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("verb", ["train", "evolve"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path, capsys, verb):
    config = {**CONFIG, "checkpoint": {"every": 2}}
    run = Run.create(tmp_path / "run", config, verb)
    assert checkpoint_to_resume(run) is None
    assert capsys.readouterr().err == ""
    for iteration in (1, 2):
        run.log({"iteration": iteration})
    # Killed before its first checkpoint: that is logged, then saved.
    assert checkpoint_to_resume(run) is None
    trim_log(run, 0)
    assert "starts again" in capsys.readouterr().err
    for iteration in (1, 2, 3):
        run.log({"iteration": iteration})
    with pytest.raises(StoppedError, match=r"no checkpoint, but .* has 3 iterations"):
        checkpoint_to_resume(run)
    run.close()


@pytest.mark.parametrize(("verb", "refused"), [("clone", True), ("evolve", False)])
def test_a_saved_policy_is_a_trace_of_checkpoints(tmp_path, verb, refused):
    run = Run.create(tmp_path / "run", {**CONFIG, "checkpoint": {"every": 9}}, verb)
    with run.save_policy_dir(Best(1, 0.0)):
        pass
    assert bool(run.trace_of_checkpoints()) is refused
    fill(run, 1)
    assert not run.trace_of_checkpoints()


def test_the_last_policy_is_that_of_an_intact_checkpoint(run):
    fill(run, 1, 2)
    (run.path / "checkpoints" / "iter_000002" / "policy" / "config.json").unlink()
    run = Run.open(run.path)
    with pytest.raises(InputError, match=r"the last .*iter_000002: .*config.json"):
        run.policy_path("last")
    (run.path / "checkpoints" / "iter_000003").mkdir()
    with pytest.raises(InputError, match=r"policy 3; checkpoints: 1, 2$"):
        run.policy_path(3)


@pytest.mark.parametrize(("keep", "expected"), [(1, [2, 5]), (2, [2, 4, 5]), (9, None)])
def test_pruning_keeps_the_newest_and_the_best(run, keep, expected):
    fill(run, 1, 2, 3, 4, 5)
    with run.save_policy_dir(Best(2, -1.5)):
        pass
    run.prune(keep)
    iterations = [iteration_of(path) for path in run.checkpoints()]
    assert iterations == (expected or [1, 2, 3, 4, 5])


def test_the_best_is_remembered(run):
    assert run.best is None
    with run.save_policy_dir(Best(7, -1.25)):
        pass
    assert Run.open(run.path).best == Best(7, -1.25)
    (run.policy_dir / "best.json").write_text("{")
    with pytest.raises(InputError, match=r"best\.json cannot be read"):
        assert run.best


# Policies


def test_the_policy_folder_is_replaced_as_a_whole(run):
    for name in ("first", "second"):
        with run.save_policy_dir() as folder:
            (folder / name).touch()
        assert [path.name for path in run.policy_dir.iterdir()] == [name]
    assert not list(run.path.glob(".policy*"))


def test_policy_survives_a_crash_between_the_renames(run):
    with run.save_policy_dir() as folder:
        (folder / "first").touch()
    run.policy_dir.rename(run.path / ".policy.old")
    # A reader uses the old folder in place; the trainer, holding the lock, restores it.
    assert (Run.open(run.path).policy_path("best") / "first").is_file()
    assert not run.policy_dir.exists()
    with run.lock():
        assert (run.policy_dir / "first").is_file()


def test_policy_path_finds_best_last_and_numbered(run):
    for choice in ("best", "last", 3):
        with pytest.raises(InputError, match="checkpoints: none yet"):
            run.policy_path(choice)
    fill(run, 3, 7)
    with run.save_policy_dir() as folder:
        (folder / "config.json").write_text("best")
    for choice, text in {"best": "best", "last": "7", 3: "3"}.items():
        assert (run.policy_path(choice) / "config.json").read_text() == text
    with pytest.raises(InputError, match="no policy 4; checkpoints: 3, 7"):
        run.policy_path(4)


# Results


def test_results_have_their_places_and_videos_never_overwrite(run):
    assert not run.evaluation_dir.exists()
    assert run.make_evaluation_dir() == run.evaluation_dir
    assert run.evaluation_dir.is_dir()
    for number, name in enumerate(["clean.webm", "clean-2.webm", "clean-3.webm"]):
        (run.path / "clean.webm").write_text(str(number))
        path = run.add_video(run.path / "clean.webm")
        assert (path.name, path.read_text()) == (name, str(number))


def test_two_videos_at_once_have_different_names(run, monkeypatch):
    folder, free = run.make_videos_dir(), metrics.free

    def free_until_now(path):
        # Another process takes the name before this one does.
        (folder / "clean.webm").write_text("other")
        monkeypatch.setattr(runs, "free", free)
        return path

    monkeypatch.setattr(runs, "free", free_until_now)
    (run.path / "clean.webm").write_text("mine")
    path = run.add_video(run.path / "clean.webm")
    assert (path.name, path.read_text()) == ("clean-2.webm", "mine")
    assert (folder / "clean.webm").read_text() == "other"


# Progress


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_progress_counts_only_the_steps_of_this_session():
    clock = Clock()
    outputs = {"clock": clock, "stream": io.StringIO()}
    progress = Progress(1000, done=400, time_limit=70, **outputs)
    assert Progress(9, **outputs).seconds_left is None
    clock.time += 10
    progress.update(500, return_mean=-1.25)
    assert progress.rate == pytest.approx(10)
    assert progress.seconds_left == pytest.approx(50)
    line = "500 / 1,000 steps  10 steps/s  0:50 left  return mean -1.25"
    assert progress.line() == line
    # The time limit ends it earlier.
    clock.time += 40
    assert progress.seconds_left == pytest.approx(20)
    clock.time += 100
    assert progress.seconds_left == 0


@pytest.mark.parametrize("last", [30, 21])
def test_progress_writes_plain_lines_now_and_then(last):
    clock, stream = Clock(), io.StringIO()
    with Progress(100, clock=clock, stream=stream, interval=10) as progress:
        for done in range(1, last + 1):
            clock.time += 1
            progress.update(done)
    lines = stream.getvalue().splitlines()
    assert [int(line.split()[0]) for line in lines] == sorted({1, 11, 21, last})
    assert "\x1b" not in stream.getvalue()


def test_progress_moves_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(100, stream=stream) as progress:
        progress.update(50)
    assert "\x1b[" in stream.getvalue()
    assert "50 / 100 steps" in stream.getvalue().splitlines()[-1]


def test_duration_is_hours_minutes_seconds():
    durations = {0: "0:00", 59.6: "1:00", 3599: "59:59", 3661: "1:01:01"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


def test_a_full_disk_ends_the_event_file_alone(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    run.log({"iteration": 1, "env_steps": 4, "return_mean": 0.5})
    records = run._events.file_writer.event_writer._ev_writer._py_recordio_writer
    with open("/dev/full", "wb") as full:
        records._writer._file.close()
        records._writer._file = full
        run.log({"iteration": 2, "env_steps": 8, "return_mean": 0.5})
        run.close()
    assert len(run.rows()) == 2


def test_an_event_file_ends_with_its_first_error():
    class Full(io.BytesIO):
        def write(self, data):
            if data == b"second":
                super().write(data[:3])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    full = Full()
    file = _TolerantFile(full)
    for record in (b"first", b"second", b"third"):
        file.write(record)
        file.flush()
    assert full.getvalue() == b"firstsec"


@pytest.mark.parametrize(
    ("best", "text", "number"),
    [
        (Best(3, 1.25), "1.25 at iteration 3", "1.25"),
        (Best(3, -0.5, "loss"), "loss 0.5 at iteration 3", "loss 0.5"),
        (Best(3, 3.0, "newest"), "iteration 3, the newest, as returns do not", ""),
        (Best(3, -math.inf), "iteration 3, before an episode was over", ""),
    ],
)
def test_the_best_checkpoint_says_what_its_score_is(best, text, number) -> None:
    assert str(best).startswith(text)
    assert best.number == number


def test_a_configuration_edited_since_a_checkpoint_is_detected(tmp_path):
    run = Run.create(tmp_path / "run", {"env": {"name": "simple_centroid"}, "seed": 3})
    with run.checkpoint(1, ("state",)) as folder:
        (folder / "state").write_text("state")
    (checkpoint,) = run.checkpoints()
    assert run.config_change(checkpoint) == run.config_change() == ""
    # A resume may change some keys, before its first checkpoint.
    env = {**run.config["env"], "workers": 2}
    run.write_config({**run.config, "env": env, "total_steps": 9, "checkpoint": {}})
    assert run.config_change() == ""
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("seed: 3", "seed: 4"))
    edited = Run.open(run.path)
    assert edited.config["seed"] == 4
    change = f"{file} has changed since iter_000001 was saved"
    assert edited.config_change(checkpoint) == edited.config_change() == change


def test_runs_that_begin_in_one_second_have_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"env": {"name": "cartpole"}, "seed": 5}
    paths = set()
    for _ in range(3):
        path = default_path(config)
        Run.create(path, config)
        paths.add(path)
    assert len(paths) == 3


def test_a_run_has_the_name_of_its_folder(tmp_path, monkeypatch):
    Run.create(tmp_path / "mine", {})
    monkeypatch.chdir(tmp_path / "mine")
    assert Run.open(".").name == "mine"
