"""Training of one fold: a network, its optimizer, and the best weights so far."""

import json
import math
import time
import zlib
from collections.abc import Sequence
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from marl_pool.compiled import compile_parts
from marl_pool.files.atomic import write_json
from marl_pool.networks.set_network import seeded
from marl_pool.observations.view import listed
from marl_pool.training.optimization import (
    descend,
    load_moments,
    moments,
    read_parts,
    write_parts,
)
from marl_pool.training.supervised import contract
from marl_pool.training.supervised.settings import FitConfig, FitSettings
from marl_pool.training.supervised.task import LossAndMetrics, Split, Task
from marl_pool.utils.errors import InputError

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
STATE, COUNTS = "learner.safetensors", "learner.json"
COUNTED = ("losses", "rate", "seconds", "step")
"""Attributes of a learner that a checkpoint stores in addition to its tensors."""
BETA, ALPHA, FIRST_EPOCHS = 0.2, 0.9, 5
"""Back-tracking: fraction β of the epochs that must be no worse, factor α of the
learning rate, and number of epochs that never suffices. SWARM, section 4.1.3."""


class Fold(NamedTuple):
    """Row numbers ``(n,)`` and ``(m,)`` of a fold's examples, disjoint."""

    train: Tensor
    validation: Tensor


def fold_rows(count: int, number: int, seed: int, settings: FitSettings) -> Fold:
    """Split ``count`` examples for the fold ``number``.

    All folds share one permutation, which depends on ``seed`` alone, so each example
    is in exactly one validation set. ``number`` counts from 0.

    Raises:
        InputError: fewer examples than folds, or than a batch.
    """
    if settings.folds > count:
        raise InputError(
            f"fit.folds: expected at most {count}, the number of examples, "
            f"got {settings.folds}"
        )
    shuffled = torch.randperm(count, generator=generator_of(seed, "folds"))
    # A single fold validates on a fraction, several on one part each.
    if settings.folds == 1:
        size = max(1, round(count * settings.validation))
        validation, train = shuffled[:size], shuffled[size:]
    else:
        parts = shuffled.tensor_split(settings.folds)
        validation = parts[number]
        train = torch.cat([*parts[:number], *parts[number + 1 :]])
    # At least one batch of training examples must remain.
    if not len(train):
        raise InputError(
            f"fit.validation: expected a fraction that leaves some of the {count} "
            f"examples for training, got {settings.validation}"
        )
    if len(train) < settings.batch_size:
        raise InputError(
            f"fit.batch_size: expected at most {len(train)}, the training examples of "
            f"a fold, got {settings.batch_size}"
        )
    return Fold(train, validation[: settings.validation_examples])


def initial_network(task: Task, seed: int, number: int) -> nn.Module:
    """Build the network of a fold.

    Layers that the task does not seed itself depend on the fold's seed, too.
    """
    fold_seed = network_seed(seed, number)
    with seeded(fold_seed, "task"):
        return contract.make_network(task, fold_seed)


def network_seed(seed: int, number: int) -> int:
    """Return the seed of a fold's initial weights."""
    return number_of(seed, "network", number)


def generator_of(seed: int, *names: object) -> torch.Generator:
    """Build a generator that depends only on the seed and the names."""
    return torch.Generator().manual_seed(number_of(seed, *names))


def number_of(seed: int, *names: object) -> int:
    """Hash the seed and the names into a seed for torch."""
    # torch's CPU generator uses only the low 32 bits of its seed: hash into those.
    return zlib.crc32(" ".join(map(str, (*names, seed))).encode())


def must_go_back(losses: Sequence[float]) -> bool:
    """Return True if it is time to return to the weights of the best epoch.

    After e earlier epochs, that is so if more than ``max(β e, 5)`` of them, directly
    before the current one, were no worse than it.

    Source: the published code of SWARM (Vollgraf, https://arxiv.org/abs/1906.09400).
    The text (section 4.1.3) differs a little: there the epochs have to be better, more
    than β of all, and only the first five epochs are exempt.

    Args:
        losses: validation loss of each epoch, the current one last; for an epoch after
            which training returned to the best weights, the loss of these.
    """
    *earlier, current = losses
    no_worse = takewhile(lambda loss: loss <= current, reversed(earlier))
    return len(list(no_worse)) > max(BETA * len(earlier), FIRST_EPOCHS)


class EpochMetrics(NamedTuple):
    """Metrics of one pass over examples."""

    means: dict[str, float]
    """Means over the examples, by metric."""
    examples: int
    seconds: float


class Means:
    """Running means of metrics; sums stay on the device until `means` is called."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.examples = 0

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add a batch's ``(B,)`` values.

        Raises:
            InputError: the batch lacks a metric of earlier ones, or has a new one.
        """
        if self._sums and self._sums.keys() != metrics.keys():
            raise InputError(
                f"metrics of a batch: expected {listed([*self._sums])}, as in the "
                f"batches before it, got {listed([*metrics])}"
            )
        for name, values in metrics.items():
            total = values.detach().double().sum()
            self._sums[name] = self._sums.get(name, 0.0) + total
        self.examples += max(map(len, metrics.values()), default=0)

    def means(self) -> dict[str, float]:
        """Return the means by name."""
        return {
            name: float(total) / self.examples for name, total in self._sums.items()
        }


class FoldLearner:
    """The network of one fold, its optimizer and its best weights.

    Attributes:
        rows: row numbers of the fold's examples.
        network: network in training.
        losses: validation metric of each epoch; after a return to the best weights,
            the metric of these.
        best: weights of the best epoch.
        best_moments: moments of the optimizer in that epoch, for back-tracking only.
        rate: factor of the learning rate by back-tracking.
        seconds: seconds of training so far.
        step: gradient steps so far.
        lr: learning rate of the last step.
    """

    def __init__(self, task: Task, config: FitConfig, number: int) -> None:
        self.task, self.number, self.seed = task, number, config.seed
        self.settings = settings = config.fit
        self.device = torch.device(config.device)
        self.rows = fold_rows(task.num_train, number, self.seed, settings)
        # Each fold has a network with different initial weights.
        network = initial_network(task, self.seed, number).to(self.device)
        if settings.compile:
            self.network = network
            self._compiled = cast(nn.Module, torch.compile(network))
        else:
            self.network = self._compiled = compile_parts(network)
        # The optimizer fuses its update into few kernels.
        self.optimizer = OPTIMIZERS[settings.optimizer](
            self.network.parameters(),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.losses: list[float] = []
        self.best: dict[str, Tensor] = {}
        self.best_moments: dict[str, Tensor] = {}
        self.rate, self.seconds, self.step, self.lr = 1.0, 0.0, 0, 0.0

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return len(self.losses)

    @property
    def best_epoch(self) -> int:
        """First epoch of the lowest validation loss, from 0."""
        return self.losses.index(min(self.losses))

    @property
    def is_out_of_time(self) -> bool:
        """True once the fold has used its seconds."""
        return self.seconds >= (self.settings.seconds_per_fold or math.inf)

    @property
    def is_done(self) -> bool:
        """True once the fold has used its epochs or its seconds."""
        return self.epoch >= self.settings.epochs or self.is_out_of_time

    def learn(self, rows: Tensor) -> EpochMetrics:
        """Train for an epoch on all rows, shuffled, except an incomplete last batch."""
        # Seed all randomness by fold and epoch, so that a resumed run repeats it.
        names = (self.number, self.epoch)
        order = torch.randperm(len(rows), generator=generator_of(self.seed, *names))
        generator = generator_of(self.seed, "learn", *names)
        # Dropout samples from torch's global generator.
        torch.manual_seed(number_of(self.seed, "dropout", *names))
        contract.begin_epoch(self.task, self.network, self.epoch, self.settings.epochs)
        self.network.train()
        # Take a step for each batch, and stop early if the fold is out of time.
        means, earlier_seconds, size = Means(), self.seconds, self.settings.batch_size
        began = time.perf_counter() - earlier_seconds
        for batch in rows[order][: len(rows) // size * size].split(size):
            outcome = self._evaluate("train", batch, generator)
            self.lr = self.rate * self.settings.lr_at(self._progress(len(rows)))
            descend(self.optimizer, outcome.loss, self.lr, self.settings.grad_clip)
            self.step += 1
            means.add({"loss": outcome.loss.expand(len(batch)), **outcome.metrics})
            self.seconds = time.perf_counter() - began
            if self.is_out_of_time:
                break
        # Reading the means waits for the GPU, so it belongs to the training time.
        averages = means.means()
        self.seconds = time.perf_counter() - began
        return EpochMetrics(averages, means.examples, self.seconds - earlier_seconds)

    def _progress(self, examples: int) -> float:
        """Return the fraction of the fold completed at the middle of the next step."""
        epoch_steps = examples // self.settings.batch_size
        by_steps = (self.step + 0.5) / (epoch_steps * self.settings.epochs)
        by_time = self.seconds / (self.settings.seconds_per_fold or math.inf)
        return min(max(by_steps, by_time), 1.0)

    def measure(self, split: Split, rows: Tensor) -> EpochMetrics:
        """Measure the current network on all ``rows``."""
        self.network.eval()
        # Every measurement of a split uses the same random numbers.
        generator = generator_of(self.seed, "measure", split)
        means, began = Means(), time.perf_counter()
        with torch.no_grad():
            for batch in rows.split(self.settings.batch_size):
                means.add(self._evaluate(split, batch, generator).metrics)
        averages = means.means()
        if self.task.metric not in averages:
            raise InputError(
                f"task: expected {type(self.task).__name__}.evaluate to measure its "
                f"metric {self.task.metric!r}, got {', '.join(averages) or 'nothing'}"
            )
        return EpochMetrics(averages, means.examples, time.perf_counter() - began)

    def end_epoch(self, loss: float) -> None:
        """Keep the weights if their validation ``loss`` is the best so far.

        Otherwise, with back-tracking, return to the best ones if it is time.
        """
        self.losses.append(loss)
        if self.best_epoch == self.epoch - 1:
            self.best = deepcopy(self.network.state_dict())
            if self.settings.back_tracking:
                self.best_moments = deepcopy(moments(self.optimizer))
        elif self.settings.back_tracking and must_go_back(self.losses):
            # Count the epoch as the best one, whose weights it now has.
            self.losses[-1] = min(self.losses)
            self.network.load_state_dict(self.best)
            load_moments(self.optimizer, self.best_moments)
            self.rate *= ALPHA

    def _evaluate(
        self, split: Split, rows: Tensor, generator: torch.Generator
    ) -> LossAndMetrics:
        batch = {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in contract.batch(self.task, split, rows).items()
        }
        mixed = self.settings.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            return contract.evaluate(
                self.task, self._compiled, batch, generator, examples=len(rows)
            )

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and counts to a folder."""
        parts = {
            "network": self.network.state_dict(),
            "best": self.best,
            "adam": moments(self.optimizer),
            "best_adam": self.best_moments,
        }
        write_parts(parts, folder / STATE)
        write_json(folder / COUNTS, {name: getattr(self, name) for name in COUNTED})

    def restore(self, folder: Path) -> None:
        """Restore what a learner with the same options saved."""
        parts = read_parts(folder / STATE, str(self.device))
        self.network.load_state_dict(parts["network"])
        load_moments(self.optimizer, parts["adam"])
        self.best, self.best_moments = parts["best"], parts["best_adam"]
        counts = json.loads((folder / COUNTS).read_text())
        for name in COUNTED:
            setattr(self, name, counts[name])
        if self.epoch:
            # A fold that ended is tested with the schedule of its last epoch.
            epochs = self.settings.epochs
            contract.begin_epoch(self.task, self.network, self.epoch - 1, epochs)
