"""Ray sessions, on this machine or on a cluster."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from marl_pool.compiled.choice import KERNELS_VARIABLE, chosen_kernels
from marl_pool.options.names import inheritance
from marl_pool.training.settings import TrainConfig, validate_gpus
from marl_pool.training.signals import STOPPING, patience
from marl_pool.utils.devices import checked_device
from marl_pool.utils.errors import InputError, StoppedError, one_line
from marl_pool.utils.text import print_line

RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a cluster; Ray sets it within its jobs."""
LOCAL = "local"
"""Address for which ray is started on this machine, even if another ray runs there."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable in which Ray passes a job its runtime environment."""
NODE_GROUP = "ray.io/node-group"
"""Label that Ray gives to the nodes of a cluster launcher or of KubeRay."""
INSTALLED = {"site-packages", "dist-packages"}
"""Names of folders with installed packages, which may take several gigabytes."""
START_SECONDS, GROWTH_SECONDS = 300.0, 1800.0
"""Limits on the start of processes, without and with machines from an autoscaler."""
JOIN_SECONDS, JOIN_INTERVAL = 30.0, 10.0
"""Limit on the wait for the head of a cluster, and interval between messages."""


def cluster_address(address: str | None) -> str:
    """Return the address of the cluster that `ray_session` would join, or `LOCAL`."""
    return address or os.environ.get(RAY_ADDRESS) or LOCAL


@contextlib.contextmanager
def ray_session(
    address: str | None,
    num_cpus: int,
    env: Mapping[str, str] | None = None,
    key: str = "resources.address",
    resume: str = "",
) -> Iterator[None]:
    """Join a cluster or start ray, and leave it at the end; reuse a running session.

    Args:
        address: address of a cluster; None joins the one in ``RAY_ADDRESS``, as within
            a Ray job, and without that variable starts ray on this machine.
        num_cpus: number of CPUs that a local ray manages.
        env: environment variables of the workers.
        key: configuration key of the address, for messages.
        resume: hint on how to resume, printed if ray ends this process.

    Raises:
        InputError: the cluster cannot be joined.
        StoppedError: ray does not start on this machine.
    """
    if ray.is_initialized():
        yield
        return
    # Ray's C++ code would print errors from which it recovers.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    key = key if address else RAY_ADDRESS
    address = cluster_address(address)
    try:
        with _same_signal_handlers():
            if address == LOCAL:
                variables = _worker_variables(env or {}, _search_path())
                _start(num_cpus, {"env_vars": variables})
            else:
                # Folders of this machine may not exist on the others.
                variables = _worker_variables(env or {}, [])
                _join(address, key, {"env_vars": variables, **_modules()})
        lost = f"marl-pool: this process was killed, or lost ray; {resume}"
        with print_at_death(lost) if resume else contextlib.nullcontext():
            yield
    finally:
        with _same_signal_handlers():
            ray.shutdown()


@contextlib.contextmanager
def print_at_death(line: str) -> Iterator[None]:
    """Print a line if this process dies in the block, however it dies.

    If it loses its head node, Ray's C++ code ends the process without a message.
    """
    script = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script, line],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # readers of our output need not wait for it
        start_new_session=True,  # Ctrl-C does not reach it
        text=True,
    )
    try:
        yield
    finally:
        child.communicate("this process lives")


@contextlib.contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces when it starts and ends."""
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # only the main thread may
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _job_environment() -> dict[str, Any]:
    """Return the runtime environment of the Ray job that runs this process."""
    job_config: dict[str, Any] = json.loads(os.environ.get(JOB_CONFIG) or "{}")
    return job_config.get("runtime_env") or {}


def _search_path() -> list[str]:
    """Return the folders in which this process finds modules that are not installed."""
    cwd = [os.getcwd()] if {"", os.getcwd()} & {*sys.path} else []
    return [*cwd, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _worker_variables(env: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    # Workers trust the plug-ins that this process trusts.
    variables = {KERNELS_VARIABLE: chosen_kernels(), **inheritance(), **env}
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    # Ray rejects variables that the job already sets.
    job_variables = _job_environment().get("env_vars") or {}
    return {name: variables[name] for name in variables.keys() - job_variables.keys()}


def _modules() -> dict[str, Any]:
    """Return the part of a runtime environment that ships plug-ins to other machines.

    Shipped are the loaded modules and whole packages from the working directory and
    ``PYTHONPATH``, which may differ on the other machines, and this package if it is
    not installed. Folders of installed packages are left out: the other machines have
    theirs.
    """
    # A job that ships code ships all of it, and Ray does not merge two lists.
    if {"working_dir", "py_modules", "excludes"} & _job_environment().keys():
        return {}
    folders = {
        folder
        for folder in map(os.path.abspath, _search_path())
        if os.path.basename(folder) not in INSTALLED
    }
    places = set[str]()
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__":
            continue
        file = getattr(module, "__file__", None)
        paths = getattr(module, "__path__", None) or [file]
        places |= {os.path.abspath(place) for place in paths if place}
    shipped = sorted(
        place
        for place in places
        if os.path.dirname(place) in folders
        and (place.endswith(".py") or os.path.isdir(place))
    )
    return {"py_modules": shipped, "excludes": ["__pycache__"]} if shipped else {}


def _start(num_cpus: int, runtime_env: Mapping[str, Any]) -> None:
    """Start ray on this machine; retry once, since a busy machine can be too slow."""
    for is_last in (False, True):
        try:
            _init(LOCAL, runtime_env, num_cpus=num_cpus, include_dashboard=False)
            return
        except Exception as error:
            if is_last:
                raise StoppedError(
                    f"ray did not start on this machine, twice: {one_line(error)}; try "
                    "again when the machine is less busy"
                ) from error
            print_line(f"ray did not start, trying again: {one_line(error)}")
            ray.shutdown()


def _join(address: str, key: str, runtime_env: Mapping[str, Any]) -> None:
    try:
        await_head(address)
        # Where there is no cluster, Ray would try to join twenty times, a minute each.
        with patience(f"joining ray at {address}", 2 * JOIN_SECONDS):
            _init(address, runtime_env)
    except Exception as error:
        raise InputError(
            f"{key}: cannot join a ray cluster at {address}: {one_line(error)}; if "
            "the cluster has a token, set RAY_AUTH_MODE=token here (docs/commands.md)"
        ) from error
    resources = ray.cluster_resources()
    print_line(
        f"joined the ray cluster at {ray.get_runtime_context().gcs_address} ({key}): "
        f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    )


def _init(address: str, runtime_env: Mapping[str, Any], **options: Any) -> None:
    ray.init(
        address=address,
        runtime_env=dict(runtime_env),
        log_to_driver=False,
        logging_level=logging.ERROR,
        **options,
    )


def await_head(address: str) -> None:
    """Wait until something listens at ``HOST:PORT``; leave other addresses to Ray.

    Raises:
        OSError: nothing listens within `JOIN_SECONDS`.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return
    began, waited, next_warning = time.monotonic(), 0.0, 0.0
    while True:
        try:
            limit = max(1.0, min(JOIN_INTERVAL, JOIN_SECONDS - waited))
            with socket.create_connection((host.strip("[]"), int(port)), limit):
                return
        except OSError as error:
            waited = time.monotonic() - began
            if waited >= JOIN_SECONDS:
                raise
            if waited >= next_warning:
                next_warning += JOIN_INTERVAL
                print_line(f"waiting for a ray cluster at {address}: {one_line(error)}")
            time.sleep(min(0.5, JOIN_SECONDS - waited))


def validate_device(config: TrainConfig) -> None:
    """Reject GPUs that a local runner or learner needs and this process lacks.

    Raises:
        InputError: a missing device, or several GPUs for a process that can use one.
    """
    # Without separate processes, runners or learners use this process's devices.
    resources, devices = config.resources, {}
    is_remote = resources.num_env_runners and resources.num_learners
    if not is_remote and config.device != "cpu":
        devices["device"] = config.device
    if not resources.num_learners and resources.num_gpus_per_learner:
        devices["resources.num_gpus_per_learner"] = "cuda"
    # GPUs need runners or learners in processes, except for one of a local learner.
    runners, learners = resources.num_env_runners, resources.num_learners
    validate_gpus("env_runner", runners, resources.num_gpus_per_env_runner)
    validate_gpus("learner", learners, resources.num_gpus_per_learner, limit=1)
    # Learners average their gradients by NCCL, which allows one process on a GPU.
    if resources.num_learners > 1 and 0 < resources.num_gpus_per_learner < 1:
        raise InputError(
            f"resources.num_gpus_per_learner: expected 0 or at least 1 for several "
            f"learners, got {resources.num_gpus_per_learner:g}"
        )
    for key, device in devices.items():
        checked_device(device, key)


def validate_cluster(demand: Mapping[str, float], key: str = "resources") -> float:
    """Reject more CPUs or GPUs than ray has, unless an autoscaler may add them.

    Args:
        demand: numbers of CPUs and GPUs, ``{"CPU": 4, "GPU": 1}``.
        key: configuration key, for messages.

    Returns:
        Seconds that processes may take to start: more if the autoscaler has to add
        machines.

    Raises:
        InputError: more than ray has.
    """
    resources = ray.cluster_resources()
    missing = {kind: n for kind, n in demand.items() if n > resources.get(kind, 0)}
    if not missing:
        return START_SECONDS
    shortage = "; ".join(
        f"expected at most {resources.get(kind, 0):g} {kind}s, got {number:g}"
        for kind, number in missing.items()
    )
    if not may_grow():
        raise InputError(f"{key}: {shortage}")
    print_line(f"{key}: {shortage}: waiting for machines from the autoscaler")
    return GROWTH_SECONDS


def has_free(demand: Mapping[str, float]) -> bool:
    """Return True if ray has so many CPUs and GPUs that nothing else uses."""
    resources = ray.available_resources()
    return all(number <= resources.get(kind, 0) for kind, number in demand.items())


def may_grow() -> bool:
    """Return True if any node of the cluster comes from a launcher or from KubeRay.

    These may have an autoscaler, whose limits Ray does not report: a demand beyond
    them waits in vain.
    """
    return any(NODE_GROUP in node["Labels"] for node in ray.nodes())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide RLlib's warnings about its own migration."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
