"""What a checkpoint holds of a fold: weights, optimizer, and how far it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from marl_pool.training.supervised.learner import Learner

STATE, COUNTS = "learner.safetensors", "learner.json"
NETWORK, BEST, OPTIMIZER, BEST_OPTIMIZER = "network", "best", "adam", "best_adam"
COUNTED = ("losses", "rate", "seconds", "step")
"""Attributes of a learner that a checkpoint holds beside its tensors."""


def save_learner(learner: Learner, folder: Path) -> None:
    """Write a learner."""
    tensors = {
        **_prefixed(NETWORK, learner.network.state_dict()),
        **_prefixed(BEST, learner.best),
        **_moments(OPTIMIZER, learner.optimizer.state_dict()),
        **_moments(BEST_OPTIMIZER, learner.best_optimizer),
    }
    _write(tensors, folder / STATE)
    counts = {name: getattr(learner, name) for name in COUNTED}
    (folder / COUNTS).write_text(json.dumps(counts))


def load_learner(learner: Learner, folder: Path) -> None:
    """Continue where a learner was saved that was built alike."""
    tensors = load_file(folder / STATE, device=str(learner.device))
    learner.network.load_state_dict(_under(NETWORK, tensors))
    learner.best = _under(BEST, tensors)
    groups = learner.optimizer.state_dict()["param_groups"]
    own, best = (
        {"state": _by_number(_under(name, tensors)), "param_groups": groups}
        for name in (OPTIMIZER, BEST_OPTIMIZER)
    )
    learner.optimizer.load_state_dict(own)
    learner.best_optimizer = best if best["state"] else {}
    counts = json.loads((folder / COUNTS).read_text())
    for name in COUNTED:
        setattr(learner, name, counts[name])


def save_network(state: Mapping[str, Tensor], file: Path) -> None:
    """Write a network's weights."""
    _write(state, file)


def load_network(network: nn.Module, file: Path) -> None:
    """Read a network's weights."""
    network.load_state_dict(load_file(file))


def _write(tensors: Mapping[str, Tensor], file: Path) -> None:
    # Cloned: safetensors refuses tensors that share memory, as tied weights do.
    on_cpu = {
        name: part.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, part in tensors.items()
    }
    # Written by Python, a full disk is an OSError like any other.
    file.write_bytes(save(on_cpu))


def _moments(prefix: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"{prefix}/{number}/{name}": part
        for number, own in state.get("state", {}).items()
        for name, part in own.items()
    }


def _by_number(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    moments: dict[int, dict[str, Tensor]] = {}
    for key, part in tensors.items():
        number, _, name = key.partition("/")
        moments.setdefault(int(number), {})[name] = part
    return moments


def _prefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": part for name, part in state.items()}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {
        key.removeprefix(start): part
        for key, part in tensors.items()
        if key.startswith(start)
    }
