"""Faults on a cluster: environments that raise, killed processes, full disks.

NaN is in test_ppo_training.py, Ctrl-C in test_interrupt.py, damaged files in
test_runs.py and test_policy_storage.py.
"""

import contextlib
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray.rllib.core.learner.learner import Learner

from helpers.ppo import assert_same, resumed, rllib_config, run_of
from helpers.training import (
    PATIENCE,
    RAY_WARNINGS,
    kill_it,
    take_its_disk,
    wait_for_rows,
)
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.files import atomic
from marl_pool.policies.storage import load_policies
from marl_pool.runs.run import Run, iteration_of
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


def assert_gapless(run: Run, iterations: int) -> None:
    """Every iteration has its row, with a full batch of new steps."""
    rows = run.rows()
    assert [row["iteration"] for row in rows] == list(range(1, iterations + 1))
    assert [row["env_steps"] for row in rows] == [
        BATCH * (i + 1) for i in range(iterations)
    ]


# An environment that raises


# With two runners one raises and the other gives its part of the batch.
@pytest.mark.parametrize(("runners", "step"), [(0, 12), (2, 6)])
def test_an_environment_that_raises_stops_the_run_with_one_line(
    tmp_path, capsys, runners, step
):
    path = tmp_path / "run"
    fault = ["env.fault=raise", f"env.fault_step={step}", "total_steps=320"]
    arguments = [*FAULTY, *fault, f"resources.num_env_runners={runners}"]
    assert cli.main(["train", "--run-dir", str(path), *arguments]) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    kept = path / "checkpoints" / "iter_000001"
    place = re.search(r"\([\w/]*faulty_farm\.py:\d+\)", line)[0]
    assert line == (
        "marl-pool: iteration 2: EscapedError: the hens escaped "
        f"{place}, raised while sampling from FaultyFarm; traceback in "
        f"{path / 'error.txt'}; try `marl-pool check-env "
        f"env=helpers.faulty_farm:FaultyFarm`; kept {kept}"
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
def test_training_survives_a_killed_runner_and_repeats_nothing(
    tmp_path, capsys, runners, step, kills
):
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

    train(run, config, should_stop=all_have_played)
    run.close()
    assert all_have_played()
    rows = run.rows()
    count = len(rows)
    assert [row["iteration"] for row in rows] == list(range(1, count + 1))
    assert [row["env_steps"] for row in rows] == [
        BATCH * runners * (i + 1) for i in range(count)
    ]
    # What a restarted runner sampled came from the newest weights.
    assert max(row["fox/first_ratio_error"] for row in rows) < 1e-5
    assert capsys.readouterr().err.count("a runner died (") == kills
    assert len(list(tmp_path.glob("killed-*"))) == kills
    for first, second in itertools.combinations(episodes_of(diary).values(), 2):
        assert first
        assert not first & second


def test_runners_that_keep_dying_end_the_run(tmp_path, monkeypatch):
    module = sys.modules["marl_pool.training.ppo.train"]
    monkeypatch.setattr(module, "MAX_RESTARTS", 2)
    with pytest.raises(StoppedError, match="returned no steps in 2 iter"):
        trained(
            tmp_path / "run",
            *FAULTY,
            *("env.fault=kill", "env.fault_step=2", "env.kills=100"),
            *(f"env.diary={tmp_path / 'diary'}", "resources.num_env_runners=1"),
        )
    assert Run.open(tmp_path / "run").rows() == []


def test_nobody_waits_for_runners_that_will_not_come_back():
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


def test_every_incarnation_of_a_runner_has_episodes_of_its_own():
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
    """Let no file of this process grow beyond ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_disk(monkeypatch, method: str, call: int, limit: int) -> None:
    """Fill the disk while ``method`` of the run is called for the ``call``th time."""
    original = getattr(Run, method)
    calls = itertools.count(1)

    @contextlib.contextmanager
    def folder(*arguments):
        disk = full_disk(limit) if next(calls) == call else contextlib.nullcontext()
        with disk, original(*arguments) as file:
            yield file

    def plain(*arguments):
        disk = full_disk(limit) if next(calls) == call else contextlib.nullcontext()
        with disk:
            return original(*arguments)

    folders = ("checkpoint", "save_policy_dir")
    monkeypatch.setattr(Run, method, folder if method in folders else plain)


PLAIN = ["env=helpers.farm:FoxAndHens", *SMALL]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """Four iterations without a fault."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return trained(path, *PLAIN, f"total_steps={BATCH * 4}")


@pytest.mark.parametrize(
    ("method", "limit", "kept", "target"),
    [
        ("checkpoint", 0, 2, "the checkpoint"),
        ("checkpoint", 1000, 2, "the checkpoint"),
        ("checkpoint", 30_000, 2, "the checkpoint"),
        ("save_policy_dir", 1000, 3, "the checkpoint"),
        ("log", 100, 2, r"metrics\.csv"),
    ],
)
def test_a_full_disk_stops_the_run_and_spoils_nothing(
    tmp_path, monkeypatch, whole, method, limit, kept, target
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
    run_again = resumed(path, BATCH * 4)
    assert_gapless(run_again, 4)
    assert_same(run_again, whole)


def test_a_full_disk_from_the_start_is_one_line(tmp_path):
    path = tmp_path / "run"
    with full_disk(0), pytest.raises(InputError, match="config.yaml cannot be writte"):
        Run.create(path, compose("train", PLAIN))
    assert not list(path.iterdir())


def test_a_full_disk_when_a_run_is_resumed_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "run"
    run = trained(path, *PLAIN, f"total_steps={BATCH * 2}")
    with run.metrics_path.open("a") as log:
        log.write("3,")
    with monkeypatch.context() as patched:
        fill_disk(patched, "resume_at", 1, 10)
        with pytest.raises(
            StoppedError, match=r"cannot write metrics.csv: .*too large"
        ):
            resumed(path, BATCH * 3)
    assert_gapless(resumed(path, BATCH * 3), 3)


# A learner


def test_a_learner_that_dies_stops_the_run(tmp_path, monkeypatch):
    step = PPOMethod.step

    def with_fault(method, iteration):
        if iteration == 2:
            method.algo.learner_group.foreach_learner(kill_it)
        return step(method, iteration)

    monkeypatch.setattr(PPOMethod, "step", with_fault)
    message = r"iteration 2: a learner died; see .*error\.txt; kept .*000001"
    with pytest.raises(StoppedError, match=message):
        trained(tmp_path / "run", *PLAIN, "resources.num_learners=1")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [item.name for item in checkpoints.iterdir()] == ["iter_000001"]


def assert_alike(first, second) -> None:
    """The same numbers in the same nested dictionaries and lists."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        pairs = [(first[key], second[key]) for key in first]
    elif isinstance(first, list | tuple):
        pairs = list(zip(first, second, strict=True))
    else:
        assert (np.asarray(first) == np.asarray(second)).all()
        return
    for a, b in pairs:
        assert_alike(a, b)


@pytest.mark.parametrize("learners", [1, 2])
def test_learners_without_the_drivers_disk_are_saved_and_go_on(
    tmp_path, monkeypatch, learners
):
    settings = [*PLAIN, f"resources.num_learners={learners}"]
    whole = [*settings, f"total_steps={BATCH * 4}"]
    # RLlib shares a batch out in another way after a resume with two learners.
    straight = trained(tmp_path / "straight", *whole) if learners == 1 else None
    build, states, restored = PPOMethod._build, [], []

    def elsewhere(method):
        algo = build(method)
        algo.learner_group.foreach_learner(take_its_disk)
        return algo

    def saved(algo, folder):
        states.append(algo.learner_group.get_state()["learner"])
        save_algorithm(algo, folder)

    module = sys.modules["marl_pool.training.ppo.train"]

    def loaded(algo, folder):
        load_algorithm(algo, folder)
        restored.extend(algo.learner_group.foreach_learner(Learner.get_state))

    monkeypatch.setattr(PPOMethod, "_build", elsewhere)
    monkeypatch.setattr(module, "save_algorithm", saved)
    monkeypatch.setattr(module, "load_algorithm", loaded)
    run = trained(tmp_path / "run", *settings, f"total_steps={BATCH * 2}")
    # What is on the driver's disk is what the learners had: weights and optimizers.
    folder = run.latest_checkpoint() / "algorithm" / "learner_group" / "learner"
    saved_state = pickle.loads((folder / "state.pkl").read_bytes())
    saved_state["rl_module"] = {
        name: pickle.loads(
            (folder / "rl_module" / name / "module_state.pkl").read_bytes()
        )
        for name in ("fox", "hen")
    }
    again, learner_state = resumed(tmp_path / "run", BATCH * 4), states[1]
    assert len(restored) == learners
    for state in (saved_state, *(answer.get() for answer in restored)):
        assert_alike(state["rl_module"], learner_state["rl_module"])
        assert_alike(state["optimizer"], learner_state["optimizer"])
    if straight is not None:
        assert_same(again, straight)


PARTS = [
    "algorithm/learner_group",
    "algorithm/learner_group/learner",
    "algorithm/learner_group/learner/rl_module/hen",
    "algorithm/env_runner",
    "algorithm/algorithm_state.pkl",
    "policy",
    "progress.json",
]


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_that_lacks_a_part_is_never_gone_on_from(
    tmp_path, capsys, whole, part, manifest
):
    """Without its manifest, too, as of an earlier version."""
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    older, newest = Run.open(path).checkpoints()[-2:]
    atomic.discard(newest / part)
    if not manifest:
        (newest / "manifest.json").unlink()
    if part.endswith("hen") and not manifest:
        # Only the manifest lists the second module. Long paths are cut off.
        with pytest.raises(StoppedError, match="cannot be read: .*module_state"):
            resumed(path, BATCH * 5)
        return
    again = resumed(path, BATCH * 5)
    message = capsys.readouterr().err
    assert f"{newest}: " in message
    assert "is missing" in message
    assert f"continuing from {older}" in message
    assert_gapless(again, 5)


FLIPPED = [
    "algorithm/learner_group/learner/state.pkl",
    "algorithm/learner_group/learner/rl_module/hen/module_state.pkl",
    "progress.json",
    "policy/model.safetensors",
    "policy/config.json",
]


@pytest.mark.parametrize("file", FLIPPED)
def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path, capsys, whole, file):
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    older, newest = Run.open(path).checkpoints()[-2:]
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / file).write_bytes(content)
    again = resumed(path, BATCH * 5)
    message = capsys.readouterr().err
    assert f"{newest}: {file} has changed since it was written" in message
    assert f"continuing from {older}" in message
    assert_gapless(again, 5)


def test_without_a_whole_checkpoint_a_run_does_not_begin_anew(tmp_path, whole):
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    for checkpoint in Run.open(path).checkpoints():
        (checkpoint / "progress.json").write_bytes(b"")
    before = (path / "policy" / "model.safetensors").read_bytes()
    with pytest.raises(StoppedError, match=r"has no intact checkpoint: .*progress"):
        resumed(path, BATCH * 5)
    assert (path / "policy" / "model.safetensors").read_bytes() == before


# A driver that is killed


def test_a_killed_driver_loses_no_more_than_a_checkpoint_interval(tmp_path):
    path, interval = tmp_path / "run", 4
    settings = [*PLAIN, f"checkpoint.every={interval}"]
    command = [sys.executable, "-m", "marl_pool", "train", "--run-dir", str(path)]
    process = subprocess.Popen(
        [*command, *settings, "total_steps=100_000_000"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_for_rows(path, process, interval + 1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    run = Run.open(path)
    logged = int(run.rows()[-1]["iteration"])
    saved = iteration_of(run.latest_checkpoint())
    # The checkpoint of the last row's iteration may have been under way.
    assert logged - saved <= interval
    progress = json.loads((run.latest_checkpoint() / "progress.json").read_text())
    assert progress["steps"] == saved * BATCH
    total = BATCH * (saved + interval + 1)
    again = resumed(path, total)
    assert_gapless(again, saved + interval + 1)
    assert_same(again, trained(tmp_path / "whole", *settings, f"total_steps={total}"))
