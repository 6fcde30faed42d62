"""Trajectories on disk: safetensors and JSON, nothing that can run code.

    FOLDER/round_000/about.json              what they are, and where they come from
    FOLDER/round_000/train.safetensors
    FOLDER/round_000/validation.safetensors
    FOLDER/round_000/manifest.json           their checksums

Round 0 is the teacher's own play, later ones are the student's.
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

from marl_pool.training.cloning.recorder import Rows
from marl_pool.training.cloning.trajectories import STEP_PARTS, Trajectories
from marl_pool.utils.atomic import new_binary_file, new_file, new_folder
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import refuse_damaged, write_manifest
from marl_pool.utils.reading import read_json
from marl_pool.version import __version__

FORMAT = 1
ABOUT, TRAIN, VALIDATION = "about.json", "train", "validation"
OWN_KEYS = ("lengths", "returns", "worlds")
NUMBERS, TABLE = "features", "table"


@dataclass(frozen=True)
class Round:
    """The trajectories of one round, and what they are."""

    train: Trajectories
    validation: Trajectories
    about: dict[str, Any]


def rounds_in(folder: Path) -> list[Path]:
    """The rounds in a folder, in their order."""
    return sorted(folder.glob("round_*"))


def round_path(folder: Path, number: int) -> Path:
    """Where a round is."""
    return folder / f"round_{number:03d}"


def save_round(path: Path, collected: Round, rows: Rows | None) -> None:
    """Write a round; a crash leaves nothing or all of it.

    Args:
        path: of its folder.
        collected: what to write.
        rows: the distinct features, where they are bytes.
    """
    table = None if rows is None else rows.table()
    about = {
        "format": FORMAT,
        "package_version": __version__,
        **collected.about,
        "digests": {
            TRAIN: list(collected.train.digests),
            VALIDATION: list(collected.validation.digests),
        },
    }
    with new_folder(path) as folder:
        for name in (TRAIN, VALIDATION):
            tensors = _tensors(getattr(collected, name), table)
            with new_binary_file(folder / f"{name}.safetensors") as binary:
                binary.write(save(tensors))
        with new_file(folder / ABOUT) as out:
            out.write(json.dumps(about, indent=1) + "\n")
        write_manifest(folder)


def load_round(path: Path, rows: Rows | None) -> Round:
    """Read what `save_round` wrote.

    Args:
        path: of its folder.
        rows: takes the distinct features, where they are bytes.

    Raises:
        InputError: missing or damaged files, or none of ours.
    """
    about = read_about(path)
    try:
        refuse_damaged(path)
    except InputError as error:
        raise InputError(f"trajectories: {error}") from error
    try:
        train, validation = (
            _read(path / f"{name}.safetensors", about["digests"][name], rows)
            for name in (TRAIN, VALIDATION)
        )
    except (SafetensorError, OSError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"trajectories: {path} is damaged: {reason}") from error
    return Round(train, validation, about)


def read_about(path: Path) -> dict[str, Any]:
    """What a round's trajectories are.

    Raises:
        InputError: its file is missing or damaged, or none of ours.
    """
    file = path / ABOUT
    try:
        about = read_json(file)
    except (OSError, ValueError) as error:
        raise InputError(f"trajectories: {file} cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise InputError(
            f"trajectories: {file}: expected format {FORMAT}, got {found!r}"
        )
    return about


def _tensors(what: Trajectories, table: Tensor | None) -> dict[str, Tensor]:
    tensors = {name: part.contiguous() for name, part in what.steps.items()}
    tensors |= {name: getattr(what, name) for name in OWN_KEYS}
    if table is not None:
        used, numbers = np.unique(what.steps[NUMBERS].numpy(), return_inverse=True)
        shape = what.steps[NUMBERS].shape
        tensors[NUMBERS] = torch.from_numpy(numbers.astype(np.int32)).view(shape)
        tensors[TABLE] = table[torch.from_numpy(used).long()]
    return tensors


def _read(file: Path, digests: list[str], rows: Rows | None) -> Trajectories:
    tensors = load_file(file)
    steps = {name: tensors[name] for name in STEP_PARTS if name in tensors}
    if TABLE in tensors:
        assert rows is not None
        numbers = rows.number(tensors[TABLE])
        flat = steps[NUMBERS].flatten().long()
        steps[NUMBERS] = numbers[flat].view(steps[NUMBERS].shape)
    lengths, returns, worlds = (tensors[name] for name in OWN_KEYS)
    return Trajectories(steps, lengths, returns, worlds, tuple(digests))
