"""Faults on a cluster: environments that raise, killed processes, full disks.

NaN is in test_ppo_training.py, Ctrl-C in test_interrupt.py, damaged files in
test_runs.py and test_policy_storage.py.
"""

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")

from ray.rllib.core.learner.learner import Learner

from helpers.ppo import assert_same, resumed, rllib_config, run_of
from helpers.training import (
    PATIENCE,
    RAY_WARNINGS,
    block_checkpoints,
    kill_learner,
    start_python,
    wait_for_rows,
)
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.files import atomic
from marl_pool.files.manifest import add_to_manifest
from marl_pool.policies.storage import load_policies
from marl_pool.runs.run import Run, iteration_of
from marl_pool.training.jobs import config_of
from marl_pool.training.ppo import train
from marl_pool.training.ppo.algorithm import load_algorithm, save_algorithm
from marl_pool.training.ppo.faults import wait_for_runner
from marl_pool.training.ppo.runner import RESTARTS, BatchedEnvRunner
from marl_pool.training.ppo.train import PPOMethod
from marl_pool.utils.errors import InputError, StoppedError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), *RAY_WARNINGS]

SMALL = [
    *("encoder.num_layers=1", "ppo.num_envs=4", "ppo.batch_size=128"),
    *("ppo.minibatch_size=64", "ppo.num_epochs=1", "checkpoint.every=1", "threads=1"),
]
"""128 agent steps are 8 steps of 4 environments of a fox and three hens."""
BATCH = 32
"""Environment steps of an iteration."""
FAULTY = ["env=helpers.faulty_farm:FaultyFarm", *SMALL]


def trained(path: Path, *overrides: str) -> Run:
    return run_of(path, compose("train", overrides))


def assert_gapless(run: Run, iterations: int, batch: int = BATCH) -> None:
    """Assert that every iteration has a row with a full batch of new steps."""
    counts = [(row["iteration"], row["env_steps"]) for row in run.rows()]
    assert counts == [(i, batch * i) for i in range(1, iterations + 1)]


# An environment that raises


# With two runners, one raises and the other returns its part of the batch.
@pytest.mark.parametrize(("runners", "step"), [(0, 12), (2, 6)])
def test_an_environment_that_raises_stops_the_run(tmp_path, capsys, runners, step):
    path = tmp_path / "run"
    fault = ["env.fault=raise", f"env.fault_step={step}", "total_steps=320"]
    arguments = [*FAULTY, *fault, f"resources.num_env_runners={runners}"]
    assert cli.main(["train", "--run-dir", str(path), *arguments]) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    checkpoint = path / "checkpoints" / "iter_000001"
    place = re.search(r"\([\w/]*faulty_farm\.py:\d+\)", line)[0]
    assert line == (
        "marl-pool: iteration 2: EscapedError: the hens escaped "
        f"{place}, raised while sampling from FaultyFarm; traceback in "
        f"{path / 'error.txt'}; try `marl-pool check-env "
        f"env=helpers.faulty_farm:FaultyFarm`; kept {checkpoint}"
    )
    text = (path / "error.txt").read_text()
    assert "Traceback" in text
    assert "faulty_farm.py" in text
    assert "in advance" in text
    run = Run.open(path)
    assert_gapless(run, 1)
    assert [c.name for c in run.checkpoints()] == ["iter_000001"]


def test_a_runner_that_cannot_be_built_is_one_line(tmp_path):
    fault = ["env.fault=init", f"env.home={os.getpid()}"]
    with pytest.raises(StoppedError, match=r"did not start: .*EscapedError") as caught:
        trained(tmp_path / "run", *FAULTY, *fault, "resources.num_env_runners=1")
    assert "\n" not in str(caught.value)
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()


# A runner that is killed


def episodes_of(diary: Path) -> dict[str, set[tuple[str, str]]]:
    """The (environment, episode) pairs that each process played."""
    played: dict[str, set[tuple[str, str]]] = {}
    for line in diary.read_text().splitlines():
        process, env, episode = line.split()
        assert (env, episode) not in played.setdefault(process, set())
        played[process].add((env, episode))
    return played


@pytest.mark.parametrize(
    ("runners", "step", "kills"),
    # In the first fragment twice, before anything was counted; in a later one, while
    # the other runner goes on.
    [(1, 3, 2), (2, 13, 1)],
)
def test_a_killed_runner_repeats_nothing(tmp_path, capsys, runners, step, kills):
    diary = tmp_path / "diary"
    faults = [
        *("env.fault=kill", f"env.fault_step={step}", f"env.kills={kills}"),
        *("env.max_steps=3", f"env.diary={diary}"),
    ]
    batch = [f"resources.num_env_runners={runners}", f"ppo.batch_size={128 * runners}"]
    config = compose("train", [*FAULTY, *faults, *batch, "checkpoint.every=1000"])
    run = Run.create(tmp_path / "run", config)

    def all_have_played() -> bool:
        return diary.is_file() and len(episodes_of(diary)) == runners + kills

    train(run, config_of(run), should_stop=all_have_played)
    run.close()
    assert all_have_played()
    rows = run.rows()
    assert_gapless(run, len(rows), BATCH * runners)
    # A restarted runner sampled with the newest weights.
    assert max(row["fox/first_ratio_error"] for row in rows) < 1e-5
    assert capsys.readouterr().err.count("a runner died (") == kills
    assert len(list(tmp_path.glob("killed-*"))) == kills
    for first, second in itertools.combinations(episodes_of(diary).values(), 2):
        assert first
        assert not first & second


def test_dead_runners_are_not_waited_for():
    @ray.remote
    class Runner:
        def ping(self) -> str:
            return "pong"

    def group(*runners, healthy=0):
        manager = SimpleNamespace(actors=lambda: dict(enumerate(runners)))
        return SimpleNamespace(
            _worker_manager=manager, num_healthy_remote_env_runners=lambda: healthy
        )

    gone, alive = Runner.remote(), Runner.remote()
    ray.kill(gone)
    for runners in (group(), group(gone), group(gone, alive), group(gone, healthy=1)):
        wait_for_runner(runners, seconds=1e9)


def test_every_restart_of_a_runner_has_new_episodes():
    config = rllib_config(compose("train", [*FAULTY, "env.max_steps=1"]))

    def episodes(restarts: int, steps: int) -> set[int]:
        runner = BatchedEnvRunner(config=config, worker_index=1, num_workers=1)
        runner.set_state({RESTARTS: restarts, "num_env_steps_sampled_lifetime": steps})
        runner.sample(num_timesteps=400)
        first = int(runner._build_env(steps + restarts * (1 << 32)).episodes[0]) + 1
        last = int(runner.rollout.env.episodes[0])
        assert last - first == 100
        return set(range(first, last + 1))

    # Killed in the first fragment, killed again at once, later, and after a resume.
    lives = [episodes(0, 0), episodes(1, 0), episodes(2, 0), episodes(2, 640)]
    for first, second in itertools.combinations(lives, 2):
        assert not first & second


# A full disk


@contextlib.contextmanager
def full_disk(limit: int):
    """Limit the size of files that this process writes to ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_disk(monkeypatch, method: str, call: int, limit: int) -> None:
    """Make the disk full during the ``call``th call of the run's ``method``."""
    original = getattr(Run, method)
    calls = itertools.count(1)

    def disk() -> contextlib.AbstractContextManager[None]:
        return full_disk(limit) if next(calls) == call else contextlib.nullcontext()

    @contextlib.contextmanager
    def folder(*arguments):
        with disk(), original(*arguments) as file:
            yield file

    def plain(*arguments):
        with disk():
            return original(*arguments)

    folders = ("checkpoint", "save_policy_dir")
    monkeypatch.setattr(Run, method, folder if method in folders else plain)


PLAIN = ["env=helpers.farm:FoxAndHens", *SMALL]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    """A run of four iterations without a fault."""
    path = tmp_path_factory.mktemp("reference") / "run"
    return trained(path, *PLAIN, f"total_steps={BATCH * 4}")


@pytest.mark.parametrize(
    ("method", "limit", "kept", "target"),
    [
        ("checkpoint", 0, 2, "the checkpoint"),
        ("checkpoint", 30_000, 2, "the checkpoint"),
        ("save_policy_dir", 1000, 3, "the checkpoint"),
        ("log", 100, 2, r"metrics\.csv"),
    ],
)
def test_a_full_disk_stops_the_run_and_spoils_nothing(
    tmp_path, monkeypatch, reference, method, limit, kept, target
):
    path = tmp_path / "run"
    with monkeypatch.context() as patched:
        fill_disk(patched, method, 3, limit)
        message = rf"iteration 3: cannot write {target}: .*File too large.*; kept .*"
        with pytest.raises(StoppedError, match=message) as caught:
            trained(path, *PLAIN, f"total_steps={BATCH * 4}")
    assert "\n" not in str(caught.value)
    run = Run.open(path)
    folders = [item.name for item in (path / "checkpoints").iterdir()]
    assert sorted(folders) == [f"iter_{i:06d}" for i in range(1, kept + 1)]
    for checkpoint in run.checkpoints():
        assert set(load_policies(checkpoint / "policy")) == {"fox", "hen"}
    assert set(load_policies(run.policy_dir)) == {"fox", "hen"}
    assert run.best.iteration in (2, 3)
    finished = resumed(path, BATCH * 4)
    assert_gapless(finished, 4)
    assert_same(finished, reference)


def test_a_full_disk_from_the_start_is_one_line(tmp_path):
    path = tmp_path / "run"
    with full_disk(0), pytest.raises(InputError, match="config.yaml cannot be writte"):
        Run.create(path, compose("train", PLAIN))
    assert not list(path.iterdir())


def test_a_full_disk_on_resume_is_one_line(tmp_path, monkeypatch, reference):
    path = shutil.copytree(reference.path, tmp_path / "run")
    with (path / "metrics.csv").open("a") as log:
        log.write("5,")
    with monkeypatch.context() as patched:
        fill_disk(patched, "resume_at", 1, 10)
        message = r"cannot write metrics.csv: .*too large"
        with pytest.raises(StoppedError, match=message):
            resumed(path, BATCH * 5)
    assert_gapless(resumed(path, BATCH * 5), 5)


# A learner


def test_a_dead_learner_stops_the_run(tmp_path, monkeypatch):
    step = PPOMethod.step

    def with_fault(method, iteration):
        if iteration == 2:
            method.algo.learner_group.foreach_learner(kill_learner)
        return step(method, iteration)

    monkeypatch.setattr(PPOMethod, "step", with_fault)
    message = r"iteration 2: a learner died; see .*error\.txt; kept .*000001"
    with pytest.raises(StoppedError, match=message):
        trained(tmp_path / "run", *PLAIN, "resources.num_learners=1")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [item.name for item in checkpoints.iterdir()] == ["iter_000001"]


def assert_equal(first, second) -> None:
    """Assert equal numbers in equally nested dictionaries and lists."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        pairs = [(first[key], second[key]) for key in first]
    elif isinstance(first, list | tuple):
        pairs = list(zip(first, second, strict=True))
    else:
        assert (np.asarray(first) == np.asarray(second)).all()
        return
    for a, b in pairs:
        assert_equal(a, b)


@pytest.mark.parametrize("learners", [1, 2])
def test_learners_without_a_disk_are_resumed(tmp_path, monkeypatch, learners):
    settings, total = [*PLAIN, f"resources.num_learners={learners}"], BATCH * 4
    # After a resume with two learners RLlib splits a batch differently.
    straight = None
    if learners == 1:
        straight = trained(tmp_path / "straight", *settings, f"total_steps={total}")
    build, states, restored = PPOMethod._build, [], []

    def without_disk(method):
        algo = build(method)
        algo.learner_group.foreach_learner(block_checkpoints)
        return algo

    def save(algo, folder):
        states.append(algo.learner_group.get_state()["learner"])
        save_algorithm(algo, folder)

    def load(algo, folder):
        load_algorithm(algo, folder)
        restored.extend(algo.learner_group.foreach_learner(Learner.get_state))

    # The function `train` hides the module of its name.
    module = sys.modules["marl_pool.training.ppo.train"]
    monkeypatch.setattr(PPOMethod, "_build", without_disk)
    monkeypatch.setattr(module, "save_algorithm", save)
    monkeypatch.setattr(module, "load_algorithm", load)
    run = trained(tmp_path / "run", *settings, f"total_steps={BATCH * 2}")
    # What is on the driver's disk is what the learners had: weights and optimizers.
    folder = run.latest_checkpoint() / "algorithm" / "learner_group" / "learner"
    saved_state = read_state(folder / "state.pt")
    modules = {name: folder / "rl_module" / name for name in ("fox", "hen")}
    saved_state["rl_module"] = {
        name: read_state(module / "module_state.pt") for name, module in modules.items()
    }
    run, learner_state = resumed(tmp_path / "run", total), states[1]
    assert len(restored) == learners
    for state in (saved_state, *(answer.get() for answer in restored)):
        assert_equal(state["rl_module"], learner_state["rl_module"])
        assert_equal(state["optimizer"], learner_state["optimizer"])
    if straight is not None:
        assert_same(run, straight)


def read_state(file: Path) -> Any:
    """Read any types, other than a resume does."""
    return torch.load(file, weights_only=False)


class Touch:
    """A value that touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return self.file.touch, ()


def test_a_checkpoint_is_read_without_running_code(tmp_path, reference):
    path, touched = tmp_path / "run", tmp_path / "touched"
    _, newest = copy_of(reference, path)
    file = "algorithm/env_runner/state.pt"
    torch.save(Touch(touched), newest / file)
    add_to_manifest(newest, file)
    with pytest.raises(StoppedError, match=r"env_runner/state.pt: .* pathlib"):
        resumed(path, BATCH * 5)
    assert not touched.exists()


def test_a_state_that_could_not_be_read_is_not_saved(tmp_path):
    learner = {"learner": {"rl_module": {}}}
    state = {"learner_group": learner, "env_runner": Touch(tmp_path)}
    answers = [SimpleNamespace(ok=True)]
    algo: Any = SimpleNamespace(
        get_state=lambda: state,
        learner_group=SimpleNamespace(foreach_learner=lambda call: answers),
        config=SimpleNamespace(num_learners=0),
    )
    message = "env_runner/state.pt: expected tensors, numpy arrays and plain data, got "
    with pytest.raises(InputError, match=message):
        save_algorithm(algo, tmp_path / "algorithm")


def copy_of(run: Run, path: Path) -> tuple[Path, Path]:
    """Copy a run; return its last two checkpoints."""
    shutil.copytree(run.path, path)
    older, newest = Run.open(path).checkpoints()[-2:]
    return older, newest


LEARNER = "algorithm/learner_group/learner"


@pytest.mark.parametrize("part", [LEARNER, "progress.json", "manifest.json"])
def test_an_incomplete_checkpoint_is_never_resumed(tmp_path, capsys, reference, part):
    path = tmp_path / "run"
    older, newest = copy_of(reference, path)
    atomic.discard(newest / part)
    run = resumed(path, BATCH * 4)
    message = capsys.readouterr().err
    for text in (f"{newest}: ", "is missing", f"continuing from {older}"):
        assert text in message
    assert_same(run, reference)


# The manifest lists every file alike (test_durability.py, test_policy_storage.py).
@pytest.mark.parametrize("file", [f"{LEARNER}/state.pt", "policy/config.json"])
def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path, capsys, reference, file):
    path = tmp_path / "run"
    older, newest = copy_of(reference, path)
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / file).write_bytes(content)
    run = resumed(path, BATCH * 4)
    message = capsys.readouterr().err
    assert f"{newest}: {file} has changed since it was written" in message
    assert f"continuing from {older}" in message
    assert_same(run, reference)


def test_without_an_intact_checkpoint_a_run_does_not_start_over(tmp_path, reference):
    path = shutil.copytree(reference.path, tmp_path / "run")
    for checkpoint in Run.open(path).checkpoints():
        (checkpoint / "progress.json").write_bytes(b"")
    before = (path / "policy" / "model.safetensors").read_bytes()
    message = r"intact checkpoint: .*00004: progress.json"
    with pytest.raises(StoppedError, match=message):
        resumed(path, BATCH * 5)
    assert (path / "policy" / "model.safetensors").read_bytes() == before


# A driver that is killed


def test_a_killed_driver_loses_no_more_than_a_checkpoint_interval(tmp_path):
    path, interval = tmp_path / "run", 4
    settings = [*PLAIN, f"checkpoint.every={interval}"]
    command = ["-m", "marl_pool", "train", "--run-dir", path, *settings]
    process = start_python(*command, "total_steps=100_000_000")
    wait_for_rows(path, process, interval + 1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    run = Run.open(path)
    logged = int(run.rows()[-1]["iteration"])
    saved = iteration_of(run.latest_checkpoint())
    # The checkpoint of the last row's iteration may be incomplete.
    assert logged - saved <= interval
    progress = json.loads((run.latest_checkpoint() / "progress.json").read_text())
    assert progress["steps"] == saved * BATCH
    total = BATCH * (saved + interval + 1)
    run = resumed(path, total)
    assert_gapless(run, saved + interval + 1)
    assert_same(run, trained(tmp_path / "straight", *settings, f"total_steps={total}"))
