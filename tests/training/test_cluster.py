"""Starting or joining ray, and how waiting for it ends."""

import ast
import inspect
import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")

from ray.rllib.algorithms.ppo import PPO
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.models.catalog import Catalog
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from helpers.paths import ROOT
from helpers.training import RAY_WARNINGS, run_python
from marl_pool.compiled.choice import KERNELS_VARIABLE, use_kernels
from marl_pool.config import compose
from marl_pool.training import cluster
from marl_pool.training.cluster import (
    GROWTH_SECONDS,
    JOB_CONFIG,
    RAY_ADDRESS,
    START_SECONDS,
    ray_session,
    validate_cluster,
    validate_device,
)
from marl_pool.training.ppo.batch import ModuleShards, episode_rows
from marl_pool.training.settings import TrainConfig
from marl_pool.training.signals import (
    STOPPING,
    Terminated,
    exit_status,
    patience,
    terminable,
)
from marl_pool.utils.errors import InputError, StoppedError

pytestmark = RAY_WARNINGS
IMPORT = r"^\s*(import|from) ray\b"


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """Arguments of calls of `ray.init`, which is replaced and does nothing."""
    calls: list[dict] = []
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    for name, result in {
        "is_initialized": False,
        "shutdown": None,
        "cluster_resources": {"CPU": 8.0},
        "get_runtime_context": context,
    }.items():
        monkeypatch.setattr(ray, name, lambda result=result: result)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(cluster, "await_head", lambda address: None)
    monkeypatch.delenv(RAY_ADDRESS, raising=False)
    monkeypatch.delenv(JOB_CONFIG, raising=False)
    return calls


@pytest.fixture(scope="module")
def users() -> dict[str, str]:
    """Contents of the files that import ray, by path."""
    files = [
        file
        for room in ("marl_pool", "marl_pool_studies", "scripts")
        for file in (ROOT / room).rglob("*.py")
    ]
    contents = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    users = {f: text for f, text in contents.items() if re.search(IMPORT, text, re.M)}
    assert users
    return users


def test_no_private_module_of_ray_is_used(users):
    for file, text in users.items():
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            private = [name for name in names if re.match(r"ray\.(.*\.)?_", name)]
            assert not private, f"{file}: {names}"


def private_names(code: str) -> set[str]:
    """Return the private attributes that a file uses or a class has, and methods."""
    attributes = re.findall(r"\.(_[a-z]\w*|__code__)\b", code)
    return {*attributes, *re.findall(r"def (_[a-z]\w*)\(self", code)}


def test_the_decision_lists_every_private_name_of_rllib(users):
    bases = {
        base
        for class_ in (PPO, LearnerGroup, EnvRunnerGroup, EnvRunner, PPOTorchLearner)
        for base in (*class_.__mro__, *Catalog.__mro__, *TorchRLModule.__mro__)
        if base.__module__.startswith("ray.")
    }
    rllib = {"__code__"}.union(*(private_names(inspect.getsource(b)) for b in bases))
    used = set().union(*map(private_names, users.values()))
    decision = (ROOT / "docs/decisions/008-rllib.md").read_text()
    listed = set(re.findall(r"`(_\w+)`", decision))
    # An older RLlib may lack some of the names.
    assert rllib & used <= listed <= used


def test_ray_leaves_the_handlers_of_signals_as_they_were(started, monkeypatch):
    def replace_handlers(**_):
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)

    monkeypatch.setattr(ray, "init", replace_handlers)
    monkeypatch.setattr(ray, "shutdown", replace_handlers)
    with terminable():
        before = {number: signal.getsignal(number) for number in STOPPING}
        with ray_session(None, num_cpus=1):
            assert {number: signal.getsignal(number) for number in STOPPING} == before
        assert {number: signal.getsignal(number) for number in STOPPING} == before


def test_a_call_of_ray_hides_no_signal():
    """A blocking call raises a KeyboardInterrupt in place of `Terminated`."""
    with terminable(), pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_status(KeyboardInterrupt()) == 143
    # A later command of the process is stopped by Ctrl-C.
    with terminable():
        assert exit_status(KeyboardInterrupt()) == 130


def test_without_an_address_a_local_ray_is_started(started, capsys):
    with use_kernels("torch"), ray_session(None, num_cpus=3):
        pass
    (call,) = started
    # Its processes use the same kernels.
    assert call["runtime_env"]["env_vars"][KERNELS_VARIABLE] == "torch"
    # None would join whatever `ray start` ran on this machine.
    assert (call["address"], call["num_cpus"]) == ("local", 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["sweep.address", RAY_ADDRESS])
def test_a_cluster_is_joined_with_its_cpus(started, capsys, monkeypatch, key):
    address = "head:6379"
    if key == RAY_ADDRESS:
        monkeypatch.setenv(RAY_ADDRESS, address)
    argument = None if key == RAY_ADDRESS else address
    with ray_session(argument, num_cpus=3, key="sweep.address"):
        pass
    (call,) = started
    assert call["address"] == address
    assert "num_cpus" not in call
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for part in (key, "10.0.0.1:6379", "8 CPUs", "0 GPUs"):
        assert part in message


def test_variables_that_a_job_sets_are_left_to_it(started, monkeypatch):
    job = {"runtime_env": {"env_vars": {"PYTHONPATH": "/job"}, "working_dir": "x"}}
    monkeypatch.setenv(JOB_CONFIG, json.dumps(job))
    monkeypatch.setenv(RAY_ADDRESS, "head:6379")
    with ray_session(None, num_cpus=1, env={"MINE": "1"}):
        pass
    environment = started[0]["runtime_env"]
    # The job's own working directory brings its modules.
    assert environment.keys() == {"env_vars"}
    assert "PYTHONPATH" not in environment["env_vars"]
    assert environment["env_vars"]["MINE"] == "1"


def test_modules_of_the_user_are_shipped_to_a_cluster(started, monkeypatch, tmp_path):
    package, file = tmp_path / "brought", tmp_path / "alone.py"
    installed = tmp_path / "site-packages"
    package.mkdir()
    brought, module_file = ModuleType("brought"), ModuleType("alone")
    brought.__path__, module_file.__file__ = [str(package)], str(file)
    # The other machines have their own installed packages.
    third_party = ModuleType("there")
    third_party.__file__ = str(installed / "there.py")
    for module in (brought, module_file, third_party):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{installed}")
    monkeypatch.chdir(tmp_path)
    for address in ("head:6379", None):
        with ray_session(address, num_cpus=1):
            pass
    joined, local = (call["runtime_env"] for call in started)
    assert joined["py_modules"] == [str(file), str(package)]
    assert joined["excludes"] == ["__pycache__"]
    assert "PYTHONPATH" not in joined["env_vars"]
    # Processes on this machine find them where they are.
    assert "py_modules" not in local
    assert str(tmp_path) in local["env_vars"]["PYTHONPATH"].split(os.pathsep)


@pytest.fixture
def refusing(started, monkeypatch) -> list[Exception]:
    """Errors that the next calls of `ray.init` raise."""
    errors: list[Exception] = []

    def init(**options):
        started.append(options)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(ray, "init", init)
    return errors


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_that_fails_is_tried_once_more(started, refusing, capsys, failures):
    refusing += [RuntimeError("The node timed out\nduring startup")] * failures
    refusal = pytest.raises(StoppedError, match=r"node timed out during")
    with refusal if failures == 2 else nullcontext() as caught:  # noqa: SIM117
        with ray_session(None, num_cpus=1):
            pass
    assert "address" not in str(caught.value if caught else "")
    assert len(started) == 2
    assert "trying again: The node timed out" in capsys.readouterr().err


def test_a_cluster_that_cannot_be_joined_is_named(started, refusing, monkeypatch):
    refusing.append(ConnectionError("Failed to connect"))
    monkeypatch.setenv(RAY_ADDRESS, "head:1")
    message = r"RAY_ADDRESS: .* head:1: Failed to connect"
    with pytest.raises(InputError, match=message), ray_session(None, num_cpus=1):
        pass
    assert len(started) == 1


def test_waiting_for_a_silent_head_is_announced_and_limited(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(cluster, "JOIN_INTERVAL", 0.1)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("ray would hang"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        # It is bound, but nothing listens.
        session = ray_session(address, num_cpus=1, key="sweep.address")
        with pytest.raises(InputError) as caught, session:
            pass
        for part in ("sweep.address: ", address, "refused"):
            assert part in str(caught.value)
        message = capsys.readouterr().err
        assert f"waiting for a ray cluster at {address}: " in message
        # A head may start later than those who join it.
        listening = threading.Timer(0.1, free.listen)
        listening.start()
        cluster.await_head(address)
        listening.join()
    cluster.await_head("auto")
    cluster.await_head("ray://127.0.0.1:1")


def test_waiting_for_a_head_that_never_answers_is_limited_too(monkeypatch):
    elapsed, limits = [0.0], []

    def connect(address, limit):
        limits.append(limit)
        elapsed[0] += limit
        raise TimeoutError("timed out")

    def sleep(seconds):
        elapsed[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: elapsed[0], sleep=sleep)
    monkeypatch.setattr(cluster, "time", clock)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(OSError, match="timed out"):
        cluster.await_head("10.0.0.1:6379")
    assert max(limits) == cluster.JOIN_INTERVAL
    assert cluster.JOIN_SECONDS <= elapsed[0] <= cluster.JOIN_SECONDS + 1


@pytest.mark.parametrize("grows", [False, True])
def test_an_autoscaler_is_waited_for(started, monkeypatch, capsys, grows):
    labels = {"ray.io/node-id": "0f", **({"ray.io/node-group": "gpu"} if grows else {})}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Labels": labels}])
    assert validate_cluster({"CPU": 8, "GPU": 0}) == START_SECONDS
    if grows:
        assert validate_cluster({"CPU": 8, "GPU": 0.5}, "sweep") == GROWTH_SECONDS
        message = capsys.readouterr().err
        assert "autoscaler" in message
    else:
        with pytest.raises(InputError) as caught:
            validate_cluster({"CPU": 8, "GPU": 0.5}, "sweep")
        message = str(caught.value)
    assert "sweep: " in message
    assert "at most 0 GPUs, got 0.5" in message
    assert "CPUs" not in message


@pytest.mark.parametrize("remote", ["num_env_runners", "num_learners"])
def test_a_device_of_the_main_process_is_checked_beside_other_processes(
    monkeypatch, remote
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    keys = ["device=cuda", f"resources.{remote}=1"]
    with pytest.raises(InputError, match="^device: expected cpu"):
        validate_device(TrainConfig.from_plain(compose("train", keys)))


def test_learners_do_not_share_a_gpu():
    keys = ["resources.num_learners=2", "resources.num_gpus_per_learner=0.5"]
    config = TrainConfig.from_plain(compose("train", keys))
    with pytest.raises(InputError, match=r"num_gpus_per_learner: .*at least 1.*0\.5"):
        validate_device(config)


def test_a_wait_prints_lines_and_ends_at_its_limit(capfd):
    limit = patience("starting 2 CPUs", 0.5, interval=0.02)
    with pytest.raises(TimeoutError, match="starting 2 CPUs: not within"), limit:
        threading.Event().wait()
    assert "marl-pool: starting 2 CPUs: 0 s" in capfd.readouterr().err
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_ends_a_wait_as_such():
    with pytest.raises(KeyboardInterrupt), patience("starting", 1000):
        signal.raise_signal(signal.SIGINT)


def test_a_process_that_dies_prints_its_message():
    script = """
import os, sys
from marl_pool.training.cluster import print_at_death
for name, end, status in (("_exit", os._exit, 1), ("sys.exit", sys.exit, 3)):
    if not (child := os.fork()):
        with print_at_death(f"lost by {name}"):
            end(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = run_python("-c", script)
    assert (result.stdout, result.stderr) == ("1\n3\n", "lost by _exit\n")


def test_every_part_of_a_batch_has_every_module():
    def chunk(module: str, agent: int, steps: int) -> SingleAgentEpisode:
        numbers = np.arange(steps) + 100 * agent
        episode = SingleAgentEpisode(
            observations={"x": np.arange(steps + 1.0)},
            infos=[{}] * (steps + 1),
            actions=numbers,
            rewards=np.zeros(steps),
            extra_model_outputs={"log_prob": numbers},
            t_started=0,
            len_lookback_buffer=0,
        )
        episode.module_id = module
        return episode

    # RLlib would give the fox to one of the learners.
    episodes = [chunk("fox", 0, 7), *(chunk("hen", i, 7) for i in (1, 2, 3))]
    episodes.append(chunk("rare", 4, 1))
    parts = ModuleShards(episodes=episodes).shard(2, len_lookback_buffer=1)
    rows = [episode_rows(data.episodes) for data, _ in parts]
    assert [set(shard) for shard in rows] == [{"fox", "hen"}] * 2
    for module, agents in {"fox": [0], "hen": [1, 2, 3]}.items():
        counts = [len(shard[module]["actions"]) for shard in rows]
        assert max(counts) - min(counts) <= 1
        actions = torch.cat([shard[module]["actions"] for shard in rows])
        expected = [100 * agent + step for agent in agents for step in range(7)]
        assert sorted(actions.tolist()) == expected
        for shard in rows:
            assert torch.equal(shard[module]["log_prob"], shard[module]["actions"])
