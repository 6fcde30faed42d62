"""Optional dependencies: which extra of the package installs a missing module."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from marl_pool.utils.errors import InputError

EXTRAS = {
    "ray": "rllib",
    "tensorboardX": "rllib",
    "cma": "evolve",
    "matplotlib": "plots",
    "pandas": "plots",
    "cv2": "plots",
    "PIL": "plots",
    "sklearn": "analysis",
    "ale_py": "atari",
    "Box2D": "box2d",
    "pygame": "box2d",
    "pybullet": "bullet",
    "mujoco": "mujoco",
    "imageio": "mujoco",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "websockets": "play",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "optuna": "search",
    "wandb": "wandb",
}
"""By module that the base installation lacks: the extra that installs it."""


@contextmanager
def explain_missing_modules() -> Iterator[None]:
    """Turn the failed import of a module of `EXTRAS` into an `InputError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise InputError(install_hint(module)) from error


def validate_ray_for(verb: str, config: Mapping[str, Any]) -> None:
    """Reject a run that needs ray if ray is not installed."""
    if verb == "train" or config.get("resources", {}).get("num_workers"):
        validate_module("ray")


def validate_module(module: str) -> None:
    """Raise an `InputError` if a module of `EXTRAS` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(install_hint(module))


def install_hint(module: str) -> str:
    """Return the command that installs a module of `EXTRAS`."""
    return f'this needs {module}: pip install "marl-pool[{EXTRAS[module]}]"'
