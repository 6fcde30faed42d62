"""Trajectories on disk, a folder for each round: safetensors and JSON.

The teacher plays in round 0, the student in later rounds. ``about.json`` describes the
round, and ``manifest.json`` has the checksums.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from marl_pool.training.cloning.recorder import RowTable
from marl_pool.training.cloning.trajectories import (
    PER_TRAJECTORY,
    STEP_PARTS,
    Trajectories,
)
from marl_pool.utils.atomic import new_binary_file, new_file, new_folder
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import validate_intact, write_manifest
from marl_pool.utils.reading import read_json
from marl_pool.version import __version__

FORMAT = 2
ABOUT, TRAIN, VALIDATION = "about.json", "train", "validation"
NUMBERS, TABLE = "features", "table"


@dataclass(frozen=True)
class Round:
    """Trajectories of one round, and their description."""

    train: Trajectories
    validation: Trajectories
    about: dict[str, Any]


def round_path(folder: Path, number: int) -> Path:
    """Return the folder of a round."""
    return folder / f"round_{number:03d}"


def save_round(path: Path, collected: Round, rows: RowTable | None) -> None:
    """Write a round atomically; ``rows`` is None unless features are uint8."""
    # The table maps the numbers of rows back to their bytes.
    table = None if rows is None else rows.table()
    about = {
        "format": FORMAT,
        "package_version": __version__,
        **collected.about,
        "digests": {
            name: list(getattr(collected, name).digests) for name in (TRAIN, VALIDATION)
        },
    }
    # Write the files into a new folder, which takes its name when it is complete.
    with new_folder(path) as folder:
        for name in (TRAIN, VALIDATION):
            tensors = _tensors(getattr(collected, name), table)
            with new_binary_file(folder / f"{name}.safetensors") as binary:
                binary.write(save(tensors))
        with new_file(folder / ABOUT) as out:
            out.write(json.dumps(about, indent=1) + "\n")
        write_manifest(folder)


def load_round(path: Path, rows: RowTable | None) -> Round:
    """Read a round that `save_round` wrote; extend the table ``rows``.

    Raises:
        InputError: missing or damaged files, or another format.
    """
    about = read_about(path)
    # Compare the checksums, then read both sides.
    try:
        validate_intact(path)
        train, validation = (
            _read(path / f"{name}.safetensors", about["digests"][name], rows)
            for name in (TRAIN, VALIDATION)
        )
    except InputError as error:
        raise InputError(f"trajectories: {error}") from error
    except (SafetensorError, OSError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"trajectories: {path} is damaged: {reason}") from error
    return Round(train, validation, about)


def read_about(path: Path) -> dict[str, Any]:
    """Read the description of a round's trajectories.

    Raises:
        InputError: a missing or damaged file, or another format.
    """
    file = path / ABOUT
    try:
        about = read_json(file)
    except (OSError, ValueError) as error:
        raise InputError(f"trajectories: {file} cannot be read: {error}") from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise InputError(
            f"trajectories: {file}: expected format {FORMAT}, got {found!r}"
        )
    return dict(about)


def _tensors(what: Trajectories, table: Tensor | None) -> dict[str, Tensor]:
    tensors = {name: part.contiguous() for name, part in what.steps.items()}
    tensors |= {name: getattr(what, name) for name in PER_TRAJECTORY}
    # Store only the rows in use, and renumber them.
    if table is not None:
        used, numbers = np.unique(what.steps[NUMBERS].numpy(), return_inverse=True)
        shape = what.steps[NUMBERS].shape
        tensors[NUMBERS] = torch.from_numpy(numbers.astype(np.int32)).view(shape)
        tensors[TABLE] = table[torch.from_numpy(used).long()]
    return tensors


def _read(file: Path, digests: list[str], rows: RowTable | None) -> Trajectories:
    tensors = load_file(file)
    steps = {name: tensors[name] for name in STEP_PARTS if name in tensors}
    # Add the rows to the run's table, and replace their numbers by those in it.
    if TABLE in tensors:
        assert rows is not None
        numbers = rows.number(tensors[TABLE])
        flat = steps[NUMBERS].flatten().long()
        steps[NUMBERS] = numbers[flat].view(steps[NUMBERS].shape)
    others = (tensors[name] for name in PER_TRAJECTORY)
    return Trajectories(steps, tuple(digests), *others)
