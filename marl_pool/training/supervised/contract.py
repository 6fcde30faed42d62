"""Calls of a `Task`, which may be a user's, whose results are checked.

An exception in a call gets a note that names the call, as in `env_call`.
"""

from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from marl_pool.envs.timeout import env_call
from marl_pool.tokens import form_of
from marl_pool.training.supervised.task import Batch, LossAndMetrics, Split, Task
from marl_pool.utils.errors import InputError

VALIDATION = "validation_"
"""Start of the columns of ``metrics.csv`` for validation."""
COLUMNS = (
    "iteration",
    "fold",
    "epoch",
    "step",
    "lr",
    "seconds",
    "samples_per_second",
    "measured_per_second",
)
"""Columns of ``metrics.csv`` that are not metrics."""


def prepare(task: Task, folder: Path, *, preview: bool = False) -> None:
    """Prepare a task's data, or only what an estimate of the cost needs."""
    name = "preview" if preview else "prepare"
    with env_call(task, name):
        getattr(task, name)(folder)
    for attribute in ("num_train", "num_test"):
        count = getattr(task, attribute, None)
        if not isinstance(count, SupportsIndex):
            _refuse(task, f".{attribute} to be an integer after {name}", form_of(count))
        if index(count) < 1:
            _refuse(task, f".{attribute} to be at least 1 after {name}", count)


def begin_epoch(task: Task, network: nn.Module, epoch: int, epochs: int) -> None:
    """Update a task's schedule; see `Task.begin_epoch`."""
    with env_call(task, "begin_epoch"):
        task.begin_epoch(network, epoch, epochs)


def make_network(task: Task, seed: int) -> nn.Module:
    """Build a network with parameters."""
    with env_call(task, "make_network"):
        network = task.make_network(seed)
    if not isinstance(network, nn.Module):
        _refuse(task, ".make_network to return a torch.nn.Module", form_of(network))
    if not any(True for _ in network.parameters()):
        _refuse(task, ".make_network to return a network with parameters", "none")
    return network


def batch(task: Task, split: Split, rows: Tensor) -> Batch:
    """Return tensors by name."""
    with env_call(task, "batch"):
        tensors = task.batch(split, rows)
    _validate_tensors(task, "batch", tensors)
    return tensors


def evaluate(
    task: Task,
    network: nn.Module,
    batch: Batch,
    generator: torch.Generator,
    *,
    examples: int,
) -> LossAndMetrics:
    """Return a loss that can be differentiated, and metrics of each example.

    While gradients are off, the loss is not used.
    """
    with env_call(task, "evaluate"):
        outcome = task.evaluate(network, batch, generator)
    if not isinstance(outcome, LossAndMetrics):
        actual = type(outcome).__name__
        _refuse(task, ".evaluate to return LossAndMetrics", actual)
    loss = outcome.loss
    if torch.is_grad_enabled():
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            _refuse(task, ".evaluate to return a scalar tensor as loss", form_of(loss))
        if not loss.requires_grad:
            _refuse(task, ".evaluate to return a loss with a gradient", "one without")
    _validate_scores(task, "evaluate", outcome.metrics, examples)
    for name in outcome.metrics:
        if name in COLUMNS or name.startswith(VALIDATION):
            reserved = f"{', '.join(COLUMNS)} and {VALIDATION}*"
            _refuse(task, f".evaluate to name metrics other than {reserved}", name)
    return outcome


def baselines(task: Task, batch: Batch, *, examples: int) -> dict[str, Tensor]:
    """Return the scores of naive predictors for each example."""
    with env_call(task, "baselines"):
        scores = task.baselines(batch)
    _validate_scores(task, "baselines", scores, examples)
    return scores


def finish(
    task: Task, network: nn.Module, folder: Path, generator: torch.Generator
) -> list[Path]:
    """Write pictures; return their paths, in the folder."""
    with env_call(task, "finish"):
        files = task.finish(network, folder, generator)
        paths = list(files) if isinstance(files, Iterable) else None
    if paths is None:
        _refuse(task, ".finish to return a list of paths", form_of(files))
    for file in paths:
        if not isinstance(file, Path):
            _refuse(task, ".finish to return a list of paths", f"a {form_of(file)}")
        if not (file.is_relative_to(folder) and file.is_file()):
            _refuse(task, f".finish to return files in {folder}", file)
    return paths


def _validate_tensors(task: Task, method: str, tensors: Mapping[str, Tensor]) -> None:
    if not isinstance(tensors, Mapping):
        expected = f".{method} to return tensors by name"
        _refuse(task, expected, form_of(tensors))
    for name, values in tensors.items():
        if not isinstance(values, Tensor):
            expected = f".{method} to return a tensor as {name!r}"
            _refuse(task, expected, form_of(values))


def _validate_scores(
    task: Task, method: str, scores: Mapping[str, Tensor], examples: int
) -> None:
    """Reject scores that are not one number for each example."""
    _validate_tensors(task, method, scores)
    for name, values in scores.items():
        if values.shape != (examples,):
            expected = f".{method} to return {name!r} of shape ({examples},)"
            _refuse(task, expected, form_of(values))


def _refuse(task: Task, expected: str, actual: object) -> NoReturn:
    raise InputError(f"task: expected {type(task).__name__}{expected}, got {actual}")
