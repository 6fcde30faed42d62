"""Sessions of ray, on this machine or on a cluster."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping

import ray
import torch

from marl_pool.kernels.native import KERNELS_VARIABLE, chosen_kernels
from marl_pool.training.errors import one_line
from marl_pool.training.settings import TrainConfig
from marl_pool.training.signals import keep_sigterm
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import inheritance


@contextlib.contextmanager
def ray_session(
    address: str | None,
    num_cpus: int,
    env: Mapping[str, str] | None = None,
    key: str = "resources.address",
) -> Iterator[None]:
    """Start ray or join a cluster, and leave it; a running session is kept.

    Args:
        address: address of a cluster; None starts ray on this machine.
        num_cpus: CPUs that a local ray assumes.
        env: environment variables of the workers.
        key: configuration key of the address, for messages.

    Raises:
        InputError: ray cannot be started or joined.
    """
    if ray.is_initialized():
        yield
        return
    # Let workers import plug-ins from where the driver does, and trust the same ones.
    own = [os.getcwd()] if {"", os.getcwd()} & {*sys.path} else []
    path = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    kernels = {KERNELS_VARIABLE: chosen_kernels()}
    variables = {"PYTHONPATH": path, **kernels, **inheritance(), **(env or {})}
    local = {"num_cpus": num_cpus, "include_dashboard": False}
    try:
        with keep_sigterm():
            ray.init(
                address=address,
                runtime_env={"env_vars": variables},
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(local if address is None else {}),
            )
    except Exception as error:
        # Ray also raises bare exceptions, for example if processes start too slowly.
        reason = one_line(error)
        raise InputError(f"{key}: cannot join or start ray: {reason}") from error
    # Leave the session that was started here, whatever happens in it.
    try:
        yield
    finally:
        ray.shutdown()


def validate_device(config: TrainConfig) -> None:
    """Reject GPUs that a local runner or learner needs and this process lacks.

    Raises:
        InputError: a missing device, or several GPUs for a process that can use one.
    """
    # Without processes of their own, runners and learners use this process's devices.
    resources, wanted = config.resources, {}
    if not resources.num_env_runners and config.device != "cpu":
        wanted["device"] = torch.device(config.device)
    if not resources.num_learners and resources.num_gpus_per_learner:
        wanted["resources.num_gpus_per_learner"] = torch.device("cuda")
    # GPUs need runners or learners in processes, except one for a local learner.
    for kind, processes, gpus, most in (
        ("env_runner", resources.num_env_runners, resources.num_gpus_per_env_runner, 0),
        ("learner", resources.num_learners, resources.num_gpus_per_learner, 1),
    ):
        if not processes and gpus > most:
            raise InputError(
                f"resources.num_gpus_per_{kind}: expected at most {most} without "
                f"processes of their own (num_{kind}s), got {gpus:g}"
            )
    # Each device must exist here.
    there = torch.cuda.device_count()
    for key, device in wanted.items():
        if (device.index or 0) >= there:
            raise InputError(
                f"{key}: expected one of the {there} CUDA devices of this process, "
                f"got {device}"
            )


def validate_cluster(**wanted: float) -> None:
    """Reject more CPUs or GPUs than ray has: it would wait for them forever."""
    for kind, number in wanted.items():
        there = ray.cluster_resources().get(kind, 0)
        if number > there:
            raise InputError(
                f"resources: expected at most {there:g} {kind}s, got {number:g}"
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide RLlib's warnings about its own migration."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
