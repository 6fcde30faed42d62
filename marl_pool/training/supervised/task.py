"""Base of supervised studies: data, a network, a loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.utils.errors import InputError

Batch = Mapping[str, Tensor]
"""Tensors by name, each with a leading batch dimension ``(B,)``."""
Split = Literal["train", "test"]
Part = Mapping[str, Any]
"""A ``name`` and the keyword options of what it names."""


class Outcome(NamedTuple):
    """Output and loss of a network for a batch.

    Attributes:
        loss: a scalar to differentiate, the mean over the batch.
        metrics: by name, ``(B,)`` numbers for each example, without a gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Task(ABC):
    """A supervised study.

    The constructor takes a task's own options, all by keyword. What the program knows
    it adds if the constructor names it: ``encoder`` and ``pooling`` (a `Part`, or None
    for ``none``), ``dropout``, ``init_std``, ``data_dir`` and ``download``.

    Attributes:
        metric: name, among an outcome's metrics, of what validation minimises.
        num_train: examples to train on and to validate with, known after `prepare`.
        num_test: examples of the hold-out test set, known after `prepare`.
    """

    metric: str
    num_train: int
    num_test: int

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Make or read the data.

        Args:
            folder: where large files may be kept; made if it is needed.

        Raises:
            InputError: the data are not there, or damaged.
        """

    def preview(self, folder: Path) -> None:
        """Make or read as few data as show what a run costs; by default all of them.

        Rows of `batch` may then be other examples than after `prepare`.

        Args:
            folder: see `prepare`.

        Raises:
            InputError: see `prepare`.
        """
        self.prepare(folder)

    @abstractmethod
    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return the examples of the given ``(B,)`` row numbers, on the CPU."""

    @abstractmethod
    def make_network(self, seed: int) -> nn.Module:
        """Build a network, its initial weights drawn from ``seed`` alone."""

    @abstractmethod
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> Outcome:
        """Apply a network to a batch.

        Args:
            network: of `make_network`; its ``training`` says what for.
            batch: on the network's device.
            generator: of whatever is random, on the CPU.
        """

    def begin_epoch(  # noqa: B027 - most tasks have no schedule
        self, network: nn.Module, epoch: int, epochs: int
    ) -> None:
        """Set what changes from epoch to epoch; by default nothing.

        Args:
            network: about to be trained.
            epoch: from 0.
            epochs: of the fold.
        """

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score naive predictors: by name, ``(B,)`` values of ``metric``."""
        return {}

    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        """Draw or tabulate what a trained network does; return what was written.

        Args:
            network: the best one of the first fold, on the CPU.
            folder: exists.
            generator: of whatever is random.
        """
        return []


def require_part(kind: str, part: Part | None, task: str) -> Part:
    """Refuse ``none`` where a task cannot do without.

    Raises:
        InputError: there is no such part.
    """
    if part is None:
        raise InputError(f"{kind}: task={task} needs one, got none")
    return part


def refuse_part(kind: str, part: Part | None, task: str) -> None:
    """Refuse a part that a task has no place for.

    Raises:
        InputError: there is one.
    """
    if part is not None:
        raise InputError(
            f"{kind}: task={task} has no place for one: expected none, "
            f"got {part['name']}"
        )
