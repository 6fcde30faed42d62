"""Folder of a sweep: new, or begun by an earlier attempt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_pool.runs.mirrored import lasting_overrides, restore_sweep, validate_new
from marl_pool.runs.run import files_in
from marl_pool.runs.sweep import TRIALS, Sweep
from marl_pool.training.sweep.plan import Plan
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import quoted


def begin_sweep(
    path: str | Path,
    plan: Plan,
    config_dir: str | Path | None,
    *,
    or_resume: bool,
    dry_run: bool,
) -> Sweep:
    """Return a new sweep, or the same one that an earlier attempt began.

    Args:
        path: folder, which need not exist.
        plan: plan of the sweep.
        config_dir: folder of the user's YAML files.
        or_resume: accept an earlier attempt, on this disk or in the storage.
        dry_run: leave the storage alone.

    Raises:
        InputError: the folder or the storage has another sweep or other files, or an
            earlier attempt that may not be resumed.
    """
    config = plan.examples[0].config
    storage = None if dry_run else config.storage
    if or_resume:
        restore_sweep(Path(path), storage)
    if not Sweep.is_at(path):
        _validate_unused(Path(path))
        validate_new(Path(path), storage)
        return Sweep(
            path, plan.grid, plan.overrides, config_dir, config.verb, plan.space
        )
    if not or_resume:
        raise InputError(
            f"{path} exists; choose another --sweep-dir or `marl-pool resume "
            f"{quoted(path)}`"
        )
    sweep = Sweep.open(path)
    _validate_same(sweep, plan, config.verb, config_dir)
    return sweep


def _validate_unused(folder: Path) -> None:
    """Reject a folder that has files, such as a run's."""
    for path in (folder / TRIALS, folder):
        files = files_in(path) if path.is_dir() else []
        if other_files := [name for name in files if name != TRIALS]:
            raise InputError(
                f"{path}: expected a new or empty folder for a sweep, got one with "
                f"{other_files[0]}"
            )


def _validate_same(
    sweep: Sweep, plan: Plan, verb: str, config_dir: str | Path | None
) -> None:
    """Reject a sweep that another command has begun.

    What a session may change, such as the number of trials at a time, may differ.
    """
    for key, expected, actual in (
        ("--verb", verb, sweep.verb),
        ("grid", plan.grid, sweep.grid),
        ("ranges", plan.space, sweep.space),
        (
            "overrides",
            lasting_overrides(plan.overrides),
            lasting_overrides(sweep.overrides),
        ),
        (
            "--config-dir",
            config_dir and str(Path(config_dir).resolve()),
            sweep.config_dir,
        ),
    ):
        # The order of the keys names the trials, and decides what a search proposes.
        if _items(expected) != _items(actual):
            raise InputError(f"{sweep.path}: {key}: expected {expected}, got {actual}")


def _items(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value
