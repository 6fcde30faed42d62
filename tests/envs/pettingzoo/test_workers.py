"""Environments in several processes: same numbers, same errors, nothing left over."""

import csv
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envs.pettingzoo.test_life import zeros
from torch.utils._pytree import tree_flatten, tree_leaves

from helpers.changing_agents import ChangingAgents
from marl_pool.cli.main import main
from marl_pool.envs.options import expand_counts
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.timeout import EnvTimeoutError, limit_calls
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError, RemoteError, described

AGENTS = "helpers.changing_agents:ChangingAgents"
BREAKER = "helpers.rule_breaker:Breaker"
FATAL = "helpers.fatal_env:FatalEnv"
TESTS = Path(__file__).parents[2]

slow = pytest.mark.slow


def rollout_of(env: PettingZooEnv) -> Rollout:
    policies = {
        name: RandomPolicy(group.action_space) for name, group in env.groups.items()
    }
    return Rollout(env, policies, explore=True)


def pids(env: PettingZooEnv) -> list[int]:
    assert env._workers is not None
    return [process.pid for process in env._workers._processes]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_end(ended: list[int]) -> None:
    limit = time.monotonic() + 30
    while any(map(is_alive, ended)):
        assert time.monotonic() < limit, f"{ended} live on"
        time.sleep(0.05)


def assert_same(first: Any, second: Any) -> None:
    """Compare trees of tensors, lists and numbers bit by bit."""
    (leaves, form), (others, other_form) = map(tree_flatten, (first, second))
    assert form == other_form
    assert all(map(np.array_equal, leaves, others))


def played(workers: int, module: str, options: dict[str, Any]) -> list[Any]:
    """Return steps, whole episodes and states, before and after they are loaded."""
    env = PettingZooEnv(5, module=module, options=options, seed=4, workers=workers)
    rollout = rollout_of(env)
    results: list[Any] = [rollout.steps(9)]
    state = rollout.state_dict()
    results += [state, rollout.steps(7)]
    # Two selections of one environment share its simulator until both are stepped.
    twins = [rollout.env.select(torch.tensor([3, 1])) for _ in range(2)]
    for twin in twins:
        results += [rollout_of(twin).steps(2)]
    rollout.load_state_dict(state)
    results += [rollout.steps(7), rollout.state_dict()]
    # Environments drop out as their episodes end.
    for _ in rollout.episodes(idle=0.0):
        pass
    return [*results, rollout.pop_finished()]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (AGENTS, {}),
        ("helpers.turn_based:RandomTurns", {"masks": "observation"}),
        ("helpers.joint_actions:JointEnv", {"masks": "infos"}),
        ("helpers.joint_actions:JointEnv", {"masks": "tuple", "kind": "dict"}),
        ("gymnasium:CartPole-v1", {}),
    ],
)
def test_results_are_those_of_one_process(module, options):
    assert_same(played(1, module, options), played(3, module, options))


def play(env: PettingZooEnv) -> None:
    env.reset()
    for _ in range(4):
        env.step(zeros(env))


def error_of(workers: int, module: str, **options: Any) -> str:
    env = PettingZooEnv(2, module=module, options=options, workers=workers)
    raised = (InputError, RemoteError, RuntimeError, StopIteration)
    with pytest.raises(raised) as caught:
        play(env)
    return described(caught.value)


RAISED = {
    "raises": "RuntimeError: the door is shut (",
    "stops": "StopIteration (",
    "stops at reset": "StopIteration (",
}
"""By fault, the error that the environment raises itself."""


@pytest.mark.parametrize(
    "fault", ["nobody after reset", "lives on", "observation shape", *RAISED]
)
def test_errors_are_those_of_one_process(fault):
    line = error_of(1, BREAKER, fault=fault)
    assert line
    assert error_of(2, BREAKER, fault=fault) == line
    if fault in RAISED:
        assert line.startswith(RAISED[fault])
        assert "rule_breaker.py:" in line


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sys.exit", "SystemExit: 3 ("),
        ("interrupts", "KeyboardInterrupt ("),
        ("os._exit", "process 1 of env.workers=2 ended with status 4"),
        ("killed", "process 1 of env.workers=2 ended by signal SIGKILL"),
    ],
)
def test_a_process_that_ends_is_one_line_and_ends_the_others(how, expected):
    env = PettingZooEnv(2, module=FATAL, options={"how": how}, workers=2)
    processes = pids(env)
    with pytest.raises(RemoteError) as caught:
        rollout_of(env).steps(4)
    assert described(caught.value).startswith(expected)
    assert not any(map(is_alive, processes))


@pytest.mark.parametrize("how", ["hangs", "spins"])
def test_a_step_that_hangs_is_ended_by_the_limit(how):
    env = PettingZooEnv(2, module=FATAL, options={"how": how}, workers=2)
    rollout, processes = rollout_of(env), pids(env)
    with limit_calls(0.5), pytest.raises(EnvTimeoutError, match=r"a step of .* 0\.5 s"):
        rollout.steps(4)
    assert not any(map(is_alive, processes))


def test_processes_end_with_the_environment_and_share_memory_without_a_name():
    env = PettingZooEnv(2, module=BREAKER, workers=2)
    env.reset()
    processes = pids(env)
    assert all(map(is_alive, processes))
    for pid in processes:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared_lines = [line for line in maps if re.search("/memfd:|/dev/shm/", line)]
        assert any("memfd:marl_pool" in line for line in shared_lines)
        assert all(line.endswith("(deleted)") for line in shared_lines)
    del env
    gc.collect()
    assert not any(map(is_alive, processes))


def test_environments_of_equal_options_take_over_kept_processes():
    options = {"module": BREAKER, "workers": 2}
    alone = [rollout_of(PettingZooEnv(4, module=BREAKER)).steps(7)] * 2
    gc.collect()
    with kept_workers():
        rollout = rollout_of(PettingZooEnv(4, **options))
        processes, steps = pids(rollout.env), [rollout.steps(7)]
        # Another environment of the same time has separate processes.
        second = PettingZooEnv(4, **options)
        assert not set(processes) & set(pids(second))
        del rollout
        gc.collect()
        rollout = rollout_of(PettingZooEnv(4, **options))
        assert pids(rollout.env) == processes
        steps.append(rollout.steps(7))
        fewer = PettingZooEnv(2, **options)
        assert not set(processes) & set(pids(fewer))
        processes += [*pids(second), *pids(fewer)]
        del rollout, second, fewer
        gc.collect()
        assert all(map(is_alive, processes))
    assert not any(map(is_alive, processes))
    for leaves in zip(*map(tree_leaves, (alone, steps)), strict=True):
        assert leaves[0] is leaves[1] is None or torch.equal(*leaves)


PARENT = """
import signal, sys
# A process in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from marl_pool.envs.options import expand_counts
from marl_pool.envs.pettingzoo.env import PettingZooEnv
options = {"how": sys.argv[1]}
env = PettingZooEnv(2, module="helpers.fatal_env:FatalEnv", options=options, workers=2)
print(*(process.pid for process in env._workers._processes), flush=True)
import torch
env.reset()
while True:
    env.step({"a": torch.zeros(2, 3, dtype=torch.int64)})
    env.step({"a": torch.zeros(2, 3, dtype=torch.int64)})
    env.reset()
"""


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("", signal.SIGKILL),
        ("", signal.SIGINT),
        ("hangs", signal.SIGINT),
        ("hangs", signal.SIGTERM),  # like SIGKILL, it ends Python at once
    ],
)
def test_processes_end_with_their_parent(how, number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert parent.stdout is not None
    processes = list(map(int, parent.stdout.readline().split()))
    assert len(processes) == 2
    time.sleep(0.5)
    parent.send_signal(number)
    try:
        _, errors = parent.communicate(timeout=30)
    finally:
        parent.kill()
    wait_for_end(processes)
    # An interrupted worker would print its own traceback.
    assert errors.count("Traceback") == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("module", "options", "problem"),
    [
        (
            "helpers.fatal_env:with_option",
            {"option": lambda: None},
            "env.workers: expected 1, because helpers.fatal_env:with_option cannot be "
            "built in another process: ",
        ),
        ("__main__:make", {}, "another process: write it in a module"),
    ],
)
def test_envs_of_this_process_alone_are_refused(monkeypatch, module, options, problem):
    main_module = sys.modules["__main__"]
    monkeypatch.setattr(main_module, "make", ChangingAgents, raising=False)
    with pytest.raises(InputError) as caught:
        PettingZooEnv(2, module=module, options=options, workers=2)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_larger_selection_is_refused():
    env = PettingZooEnv(2, module=BREAKER, workers=2)
    env.reset()
    selection = env.select(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(InputError, match="at most 2 environments"):
        selection.step({"a": torch.zeros(5, 3, dtype=torch.int64)})


def test_one_environment_needs_no_process():
    assert PettingZooEnv(1, module=BREAKER, workers=4)._workers is None
    assert len(pids(PettingZooEnv(2, module=BREAKER, workers=4))) == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", "env.workers: expected an integer >= 1, got 0"),
        ("x", "env.workers: expected an integer >= 1, got 'x'"),
        ("9", "env.workers: expected at most ppo.num_envs = 4, got 9"),
    ],
)
def test_wrong_numbers_of_processes(tmp_path, capsys, value, expected):
    command = [f"env.module={BREAKER}", "ppo.num_envs=4", f"env.workers={value}"]
    folder = ["--run-dir", str(tmp_path / "run")]
    assert main(["train", "env=pettingzoo", *command, *folder]) == 2
    assert capsys.readouterr().err.strip().endswith(expected)


@slow
def test_training_and_evaluation_are_those_of_one_process(tmp_path):
    texts: list[list[Any]] = []
    for workers in (1, 2):
        run = tmp_path / f"run_{workers}"
        command = ["env=pettingzoo", f"env.module={AGENTS}", f"env.workers={workers}"]
        sizes = ["ppo.num_envs=3", "ppo.num_epochs=1", "total_steps=200", "threads=1"]
        assert main(["train", *command, *sizes, "--run-dir", str(run)]) == 0
        evaluate = ["evaluate", str(run), "suite=quick", "episodes=5"]
        assert main([*evaluate, "--plugin", AGENTS]) == 0
        rows = (run / "metrics.csv").read_text().splitlines()
        header = rows[0].split(",")
        columns = [i for i, name in enumerate(header) if "seconds" not in name]
        columns = [i for i in columns if "per_second" not in header[i]]
        texts.append([[row.split(",")[i] for i in columns] for row in rows])
        # The table names the run and its options.
        with (run / "evaluation" / "results.csv").open() as file:
            results = list(csv.DictReader(file))
        for line in results:
            del line["run"], line["env"], line["config_digest"]
        texts[-1].append(results)
    assert texts[0] == texts[1]


def test_resume_may_change_the_number_and_runs_stay_comparable(tmp_path):
    run = tmp_path / "run"
    command = ["train", "env=pettingzoo", f"env.module={AGENTS}", "ppo.num_envs=2"]
    command += ["ppo.num_epochs=1", "total_steps=500", "threads=1"]
    assert main([*command, "--run-dir", str(run)]) == 0
    words = ["resume", str(run), "--plugin", AGENTS, "total_steps=900", "env.workers=2"]
    assert main(words) == 0
    assert "workers: 2" in (run / "config.yaml").read_text()
    options = {"name": "pettingzoo", "module": AGENTS}
    assert expand_counts({**options, "workers": 2}) == options
    # Any other environment keeps an option of that name.
    plugin_options = {"name": "plug_in:Env", "workers": 2}
    assert expand_counts(plugin_options) == plugin_options
