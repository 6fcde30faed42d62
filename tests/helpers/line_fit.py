"""A supervised task of a few milliseconds: the slope of a line through the origin."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from marl_pool.training.supervised.task import Batch, LossAndMetrics, Split, Task


class LineFit(Task):
    """Predict y = 3 x from x with one weight; optionally noisy, or with a NaN loss.

    Args:
        num_samples: number of samples for training and validation.
        nan_after: epochs after which the loss is NaN, or None for never.
        noisy: let the loss depend on the generator and on torch's global one.
    """

    metric = "squared_error"

    def __init__(
        self, *, num_samples: int = 60, nan_after: int | None = None, noisy: bool = True
    ) -> None:
        self.count, self.nan_after, self.noisy = num_samples, nan_after, noisy
        self.epoch = 0

    def prepare(self, folder: Path) -> None:
        self.num_train, self.num_test = self.count, 10

    def batch(self, split: Split, rows: Tensor) -> Batch:
        x = rows.double().add(1).sin()[:, None] + (split == "test")
        return {"x": x, "y": 3 * x}

    def make_network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = (nn.Dropout(0.1 if self.noisy else 0.0), nn.Linear(1, 1, bias=False))
        return nn.Sequential(*layers).double()

    def begin_epoch(self, network: nn.Module, epoch: int, epochs: int) -> None:
        self.epoch = epoch

    def evaluate(
        self, network: nn.Module, batch: Batch, generator: torch.Generator
    ) -> LossAndMetrics:
        squared_errors = (network(batch["x"]) - batch["y"]).square()[:, 0]
        loss = squared_errors.mean()
        if self.noisy:
            loss = loss * (0.5 + torch.rand((), generator=generator))
        if self.nan_after is not None and self.epoch >= self.nan_after:
            loss = loss * float("nan")
        return LossAndMetrics(loss, {"squared_error": squared_errors.detach()})

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        return {"zero": batch["y"][:, 0].square()}

    def finish(
        self, network: nn.Module, folder: Path, generator: torch.Generator
    ) -> list[Path]:
        file = folder / "slope.txt"
        file.write_text(str(network[1].weight.item()))
        return [file]


class Unfinished(Task):
    """A task that implements nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
