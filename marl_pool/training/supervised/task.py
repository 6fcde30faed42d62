"""Interface of supervised tasks: data, a network, a loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.options.types import NamedOptions
from marl_pool.utils.errors import InputError

Batch = Mapping[str, Tensor]
"""Tensors by name, each with a leading batch dimension ``(B,)``."""
Split = Literal["train", "test"]


class LossAndMetrics(NamedTuple):
    """Loss and metrics of a network on a batch."""

    loss: Tensor
    """Scalar to differentiate, the mean over the batch."""
    metrics: dict[str, Tensor]
    """``(B,)`` values for each example by name, without a gradient.

    A name is a column of ``metrics.csv``; names of its other columns, such as
    ``seconds``, are rejected, except ``loss``, whose place the metric takes.
    """


class Task(ABC):
    """A supervised problem: its data, its network and its loss.

    The constructor takes the task's own options, all by keyword. It also receives, if
    its signature names them, the parts and settings of the run: ``encoder`` and
    ``pooling`` (a `NamedOptions`, or None for ``none``), ``dropout``, ``init_std``,
    ``data_dir`` and ``download``.

    The trainer calls `prepare` once, `make_network` for each fold, `begin_epoch` and
    `evaluate` (on batches from `batch`) for each epoch, and `finish` at the end.

    Attributes:
        metric: name of the metric that validation minimises.
        num_train: examples for training and validation, known after `prepare`.
        num_test: examples of the hold-out test set, known after `prepare`.
    """

    metric: str
    num_train: int
    num_test: int

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Generate or read the data; large files go to ``folder``, created if needed.

        Raises:
            InputError: missing or damaged data.
        """

    def preview(self, folder: Path) -> None:
        """Prepare enough data to estimate the cost of a run; by default all of it.

        The rows of `batch` may then be other examples than after `prepare`.
        """
        self.prepare(folder)

    @abstractmethod
    def batch(self, split: Split, rows: Tensor) -> Batch:
        """Return the examples of the given ``(B,)`` row numbers, on the CPU."""

    @abstractmethod
    def make_network(self, seed: int) -> nn.Module:
        """Build a network; its initial weights depend only on ``seed``.

        The trainer also seeds torch's generators, from which layers sample by default.
        """

    @abstractmethod
    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        """Apply a network to a batch on its device; ``generator`` is on the CPU.

        In training mode the loss is differentiated, otherwise the metrics are averaged.
        """

    def begin_epoch(  # noqa: B027 - most tasks have no schedule
        self, network: nn.Module, epoch: int, epochs: int
    ) -> None:
        """Update the schedule before ``epoch``, from 0, of a fold's ``epochs``."""

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score naive predictors by ``metric``; return ``(B,)`` values by name."""
        return {}

    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        """Plot or tabulate predictions in a folder; return the files written.

        ``network`` is the best one of the first fold, on the CPU.
        """
        return []


def validate_part(kind: str, part: NamedOptions | None, task: str) -> NamedOptions:
    """Return a part that the task requires, or raise if it is None."""
    if part is None:
        raise InputError(f"{kind}: expected one with task={task}, got none")
    return part


def validate_no_part(kind: str, part: NamedOptions | None, task: str) -> None:
    """Reject a part that the task does not use."""
    if part is not None:
        raise InputError(
            f"{kind}: expected none, got {part['name']}: task={task} uses no {kind}"
        )
