"""Sweeps that train: killed, interrupted, resumed, with trials that fail."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from helpers.training import PATIENCE, start_python, wait_for_rows
from marl_pool.cli.main import main
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import read_table
from marl_pool.training.cluster import quiet, ray_session

# Its commands start ray themselves.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]

MARK = "MARL_POOL_TEST_SWEEP"
"""An environment variable that a command's processes inherit, to find them by."""
SMALL = [
    *("env.counts=1-2-2", "env.max_steps=8", "encoder.num_layers=1", "ppo.num_envs=4"),
    *("ppo.batch_size=32", "ppo.minibatch_size=32", "ppo.num_epochs=1"),
    "checkpoint.every=2",
]
HEADS = """
from marl_pool.pooling.base import Pooling

class Fails(Pooling):
    def __init__(self, dim: int):
        super().__init__(dim)

    def forward(self, x, padding=None, types=None):
        if len(x) > 2:  # not when it is tried before the start
            raise RuntimeError("no such sum")
        return x.sum(dim=1)
"""


@pytest.fixture
def one_ray() -> Iterator[None]:
    """One ray for all commands of this process; they join one that is running."""
    with quiet(), ray_session(None, num_cpus=2):
        yield


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    options = {"cwd": folder, "env": {**os.environ, MARK: str(folder)}}
    options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    return start_python("-m", "marl_pool", *arguments, **options)


def left_over(folder: Path) -> dict[int, str]:
    """Return the ids of processes started by a command in ``folder`` that still run."""
    mark, processes = f"{MARK}={folder}".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                processes[int(process.name)] = (process / "cmdline").read_text()
        except OSError:
            continue  # it ended, or is another user's
    return processes


def iterations(run: Path) -> list[int]:
    if not (run / "metrics.csv").is_file():
        return []
    return [int(row["iteration"]) for row in Run.open(run).rows()]


def without_orphans(folder: Path) -> None:
    for _ in range(int(10 * PATIENCE)):
        if not left_over(folder):
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {left_over(folder)}")


def test_a_sweep_survives_a_kill_and_ctrl_c_and_reports_what_failed(tmp_path):
    (tmp_path / "own_heads.py").write_text(HEADS)
    swept = ["pooling=max,own_heads:Fails", "seed=choice(5)"]
    flags = ["--sweep-dir", "s", "--concurrency", "2"]
    good = tmp_path / "s" / "trials" / "pooling=max,seed=5"
    bad = tmp_path / "s" / "trials" / "pooling=own_heads:Fails,seed=5"

    first = start(tmp_path, "sweep", *swept, *SMALL, *flags, "total_steps=10_000_000")
    wait_for_rows(good, first, 5)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    without_orphans(tmp_path)
    saved = Run.open(good).latest_checkpoint()
    assert saved is not None

    # Only the steps since the last checkpoint are lost.
    reached = max(iterations(good))
    allowed = ["--plugin", "own_heads:Fails"]
    second = start(tmp_path, "resume", "s", *allowed)
    wait_for_rows(good, second, reached + 3)
    os.killpg(second.pid, signal.SIGINT)  # as a terminal does
    output, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 130, output
    assert "marl-pool: stopped; resume with: marl-pool resume s" in output
    assert "resume s --plugin own_heads:Fails" in output
    assert "Traceback" not in output
    without_orphans(tmp_path)
    iteration = max(iterations(good))
    assert Run.open(good).latest_checkpoint().name == f"iter_{iteration:06d}"
    assert iterations(good) == list(range(1, iteration + 1))
    assert {row["status"] for row in read_table(tmp_path / "s")} <= {"stopped"}

    override = f"total_steps={32 * (iteration + 2)}"
    third = start(tmp_path, "resume", "s", override, *allowed)
    output, _ = third.communicate(timeout=PATIENCE)
    assert third.returncode == 1, output
    assert "0 finished, 1 to resume, 1 to start" in output
    assert "marl-pool: pooling=own_heads:Fails,seed=5 failed: " in output
    assert "no such sum" in output
    assert "no such sum" in (bad / "error.txt").read_text()
    assert iterations(good) == list(range(1, iteration + 3))
    table = read_table(tmp_path / "s" / "table.csv")
    assert [row["iteration"] for row in table] == list(range(1, iteration + 3))
    trials = {(row["status"], row["pooling"], row["seed"]) for row in table}
    assert trials == {("finished", "max", 5)}
    assert not (tmp_path / "s" / ".stop").exists()


def test_a_trial_whose_process_dies_is_resumed_twice(tmp_path):
    run = tmp_path / "s" / "trials" / "seed=1"
    flags = ("--sweep-dir", "s", "seed=choice(1)", "total_steps=10_000_000")
    sweep = start(tmp_path, "sweep", *flags, *SMALL)
    for _ in range(3):
        reached = max(iterations(run), default=0)
        wait_for_rows(run, sweep, reached + 4)
        (trial,) = (
            number
            for number, title in left_over(tmp_path).items()
            if title.startswith("ray::run_trial")
        )
        os.kill(trial, signal.SIGKILL)
    output, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, output
    assert "marl-pool: seed=1 failed: its process died 3 times" in output
    assert iterations(run) == list(range(1, max(iterations(run)) + 1))
    assert max(iterations(run)) >= reached + 3
    without_orphans(tmp_path)


@pytest.mark.usefixtures("one_ray")
def test_an_interrupted_search_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    search = ["--search", "ppo.lr=log_uniform(1e-4,1e-1)", "pooling=choice(max,avg)"]
    limits = ["--trials", "2", "--concurrency", "1", "total_steps=1600", "seed=4"]
    sizes = [*SMALL[:-1], "checkpoint.every=25", "--or-resume"]

    def command(name: str) -> list[str]:
        places = ["--sweep-dir", f"{name}/s", "--storage", f"file://{tmp_path}/{name}s"]
        return ["sweep", *search, *sizes, *limits, *places]

    def result(name: str) -> tuple[str, list[dict]]:
        """Proposals, and the rows of all trials without times."""
        rows = read_table(tmp_path / name / "s")
        places = [(row["trial"], row["iteration"]) for row in rows]
        assert places == sorted({*places})
        untimed = [key for key in rows[0] if "second" not in key]
        proposals = (tmp_path / name / "s" / "proposals.yaml").read_text()
        return proposals, [{key: row[key] for key in untimed} for row in rows]

    assert main(command("whole")) == 0
    # Slurm's warning stops the first trial with its checkpoint, and the search goes on
    # from the storage alone.
    process = start(tmp_path, *command("part"))
    first = tmp_path / "part" / "s" / "trials" / "0000"
    wait_for_rows(first, process, 3)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGUSR1, output
    assert "stopped; resume with: marl-pool resume" in output
    assert "Traceback" not in output
    assert Run.open(first).last_saved_iteration == max(iterations(first))
    shutil.rmtree(tmp_path / "part")
    assert main(command("part")) == 0
    assert {row["trial"] for row in read_table("part/s")} == {"0000", "0001"}
    assert result("part") == result("whole")


def test_a_wrong_metric_ends_a_search_and_failed_trials_do_not(elsewhere, capsys):
    pytest.importorskip("optuna")
    source = HEADS.replace("if len(x) > 2:", "if len(x) > 2 and Path('fail').exists():")
    Path("search_heads.py").write_text(f"from pathlib import Path\n{source}")
    head, wrong = "search_heads:Fails", "sweep.metric=retrun_mean"
    command = ["sweep", "--search", "ppo.lr=uniform(1e-4,1e-2)", f"pooling={head}"]
    command += [*SMALL, "--trials", "2", "--concurrency", "1"]
    assert main([*command, "total_steps=1e7", "--sweep-dir", "s", wrong]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    for text in (
        "marl-pool: unknown sweep.metric 'retrun_mean'",
        "episodes, ",
        "_mean",
    ):
        assert text in line
    assert os.listdir("s/trials") == ["0000"]
    assert {row["status"] for row in read_table("s")} == {"stopped"}
    assert Run.open("s/trials/0000").last_saved_iteration == 1

    # Trials without a score are no reason to stop.
    Path("fail").touch()
    right = ["total_steps=64", "sweep.metric=return_mean", "--plugin", head]
    assert main(["resume", "s", *right]) == 1
    error = capsys.readouterr().err
    for name in ("0000", "0001"):
        assert re.search(f"marl-pool: {name} failed: .*no such sum", error)


@pytest.mark.usefixtures("one_ray")
def test_trials_are_ordinary_runs_and_a_dry_run_leaves_nothing(elsewhere, capsys):
    home = Path("~/ray_results").expanduser()
    before = set(home.iterdir()) if home.is_dir() else None
    command = ["sweep", "seed=0,1", *SMALL, "total_steps=64"]

    assert main([*command, "--dry-run", "--seed-sd", "2"]) == 0
    preview = capsys.readouterr().out
    assert "2 runs: seed (2)" in preview
    assert "128 steps in total, 128 remaining" in preview
    assert "in the return (two-sided t test" in preview
    assert re.search(r"about \d+ \w+ with", preview)
    assert preview.endswith("           0 of 64 steps  seed=1\n")
    assert not list(elsewhere.iterdir())

    assert main([*command, "--sweep-dir", "s"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\ns\ns/table.csv\n")
    for later in ("ls s", "evaluate s/trials/*", "report s/trials/*"):
        assert f" marl-pool {later}\n" in err
    table = read_table("s")
    steps = [(row["seed"], row["env_steps"]) for row in table]
    assert steps == [(0, 32), (0, 64), (1, 32), (1, 64)]
    trial = "s/trials/seed=1"
    arguments = ["train", *command[2:], "seed=1", "threads=1", "--run-dir", "one"]
    assert main(arguments) == 0
    rows = Run.open("one").rows()
    untimed = [name for name in rows[0] if "second" not in name]
    for row, table_row in zip(rows, table[2:], strict=True):
        assert [row[name] for name in untimed] == [table_row[name] for name in untimed]
    assert main(["evaluate", trial, "suite=quick", "episodes=2"]) == 0
    after = set(home.iterdir()) if home.is_dir() else None
    assert before == after
