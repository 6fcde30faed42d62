"""Tensors in safetensors files."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from marl_pool.files.atomic import new_binary_file


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors as safetensors, all of them or none."""
    on_cpu: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        # safetensors rejects tensors that share memory, as tied weights do.
        on_cpu[name] = dense.clone() if storage in storages else dense
        storages.add(storage)
    # Write with Python, so that a full disk is an OSError like any other.
    with new_binary_file(file) as out:
        out.write(save(on_cpu))
