"""Tensors of networks and optimizers, by name, in one file of a checkpoint."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from marl_pool.kernels.batched import strip_prefix
from marl_pool.utils.atomic import new_binary_file


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors as safetensors, all of them or none."""
    # Clone: safetensors rejects tensors that share memory, as tied weights do.
    on_cpu = {
        name: part.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, part in tensors.items()
    }
    # Write from Python, so that a full disk is an OSError.
    with new_binary_file(file) as out:
        out.write(save(on_cpu))


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put a prefix and a slash before each name."""
    return {f"{prefix}/{name}": part for name, part in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `prefixed`."""
    return strip_prefix(prefix, tensors, separator="/")


def adam_moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors in an optimizer's ``state_dict``, by parameter and name."""
    return {
        f"{number}/{name}": part
        for number, own in state.get("state", {}).items()
        for name, part in own.items()
    }


def with_moments(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Build an optimizer's ``state_dict`` from `adam_moments`; {} without any."""
    state: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, part in tensors.items():
        number, _, name = key.partition("/")
        state[int(number)][name] = part
    groups = optimizer.state_dict()["param_groups"]
    return {"state": dict(state), "param_groups": groups} if state else {}
