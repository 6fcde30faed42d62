"""Tensors in safetensors files."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from marl_pool.files.atomic import new_binary_file


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors as safetensors, all of them or none."""
    # Clone them: safetensors refuses tensors that share memory, as tied weights do.
    on_cpu = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    # Write by Python, so that a full disk is an OSError like any other.
    with new_binary_file(file) as out:
        out.write(save(on_cpu))
