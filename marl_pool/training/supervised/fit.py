"""Supervised fits: folds, epochs, measurements, results, and the estimated cost."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from typing_extensions import override

from marl_pool.compiled import compile_parts
from marl_pool.envs.timeout import explain_call_errors
from marl_pool.files.atomic import make_folder, write_json
from marl_pool.files.manifest import add_to_manifest, validate_intact
from marl_pool.files.tensors import write_tensors
from marl_pool.networks.set_network import seeded
from marl_pool.options.construction import build
from marl_pool.runs.run import Run
from marl_pool.training.errors import StepError, stopped_error, writing
from marl_pool.training.jobs import with_absolute_folders
from marl_pool.training.loop import Iteration, TrainingLoop, TrainingMethod, never
from marl_pool.training.supervised import TASKS, contract
from marl_pool.training.supervised.contract import VALIDATION
from marl_pool.training.supervised.learner import (
    FoldLearner,
    Means,
    generator_of,
    initial_network,
)
from marl_pool.training.supervised.results import (
    FoldResult,
    results_table,
    write_results,
)
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.supervised.task import Split, Task
from marl_pool.utils.devices import checked_device
from marl_pool.utils.errors import InputError, described, one_line
from marl_pool.utils.paths import user_path
from marl_pool.utils.text import print_line

PROGRESS, NETWORKS, PICTURES, DATA = "progress.json", "networks", "pictures", "data"
FIRST_ROWS = 16
"""Examples of each split that a `fingerprint` reads."""
BATCHES = 2
"""Timed batches in each epoch of an estimate, after one for warm-up."""


class Cost(NamedTuple):
    """Estimated cost of a run; ``str`` gives one line."""

    folds: int
    epochs: int
    """Epochs of each fold, at most."""
    examples: int
    """Training examples of an epoch."""
    rate: float
    """Training examples per second."""
    seconds: float
    """Duration of the whole run."""

    def __str__(self) -> str:
        return (
            f"about {duration(self.seconds)}: {self.folds} "
            f"fold{'s' if self.folds > 1 else ''} of at most {self.epochs} epochs of "
            f"{self.examples:,} examples, {self.rate:,.0f} examples/s"
        )


def fit(run: Run, config: FitConfig, should_stop: Callable[[], bool] = never) -> None:
    """Fit a network for each fold, test the best weights of each, write the results.

    The run receives metrics, checkpoints, networks, pictures and ``results.json``; with
    a checkpoint, it continues from there. See `Job.function` for the arguments.

    Raises:
        InputError: incompatible parts of the configuration, or missing data.
        StoppedError: the loss or a metric was not finite, or the disk is full.
    """
    config = with_absolute_folders(config)
    loop = TrainingLoop(run, config, should_stop)
    loop.train(lambda checkpoint: FitMethod(run, config, checkpoint))


def make_task(config: FitConfig) -> Task:
    """Build the task of a run, without preparing its data.

    Raises:
        InputError: incompatible options.
    """
    context = {
        "encoder": config.encoder.or_none,
        "pooling": config.pooling.or_none,
        "dropout": config.fit.dropout,
        "init_std": config.fit.init_std,
        "data_dir": config.data_dir,
        "download": config.download,
    }
    name, options = config.task.name, config.task.arguments
    task: Task = build(name, TASKS, "task", Task, options, context)
    if not isinstance(metric := getattr(task, "metric", None), str):
        raise InputError(
            f"task: expected {type(task).__name__}.metric to be the name of a metric, "
            f"got {metric!r:.80}"
        )
    return task


@explain_call_errors()
def price(config: FitConfig, folder: Path) -> Cost:
    """Estimate the cost of a run from a few of its batches.

    Generated data go to ``folder``. Raises `InputError` where `fit` does.
    """
    torch.set_num_threads(config.threads)
    checked_device(config.device)
    task = make_task(config)
    contract.prepare(task, _data_folder(config, folder), preview=True)
    return estimate(task, config)


def estimate(task: Task, config: FitConfig) -> Cost:
    """Time a few batches, and extrapolate to the whole run.

    Batches of the first, the middle and the last epoch are timed, because a schedule
    may change the cost: a merging network becomes deeper, and slower, by the epoch.
    """
    learner, settings = FoldLearner(task, config, 0), config.fit
    rows, size = learner.rows, BATCHES * settings.batch_size
    # Warm up, then time.
    learner.learn(rows.train[: settings.batch_size])
    learned, measured = [], []
    for epoch in (0, settings.epochs // 2, settings.epochs - 1):
        learner.losses = [0.0] * epoch
        learned.append(learner.learn(rows.train[:size]))
        measured.append(learner.measure("train", rows.validation[:size]))
    learning_time, measuring_time = (
        mean(part.seconds / part.examples for part in parts)
        for parts in (learned, measured)
    )
    # Extrapolate, at most to the limit of a fold.
    epoch_time = learning_time * len(rows.train)
    training = min(epoch_time * settings.epochs, settings.seconds_per_fold or math.inf)
    # Add the validation after each epoch and the test at the end.
    measured_examples = len(rows.validation) * training / epoch_time + task.num_test
    seconds = settings.folds * (training + measuring_time * measured_examples)
    return Cost(
        settings.folds, settings.epochs, len(rows.train), 1 / learning_time, seconds
    )


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@explain_call_errors()
def validate_data(config: FitConfig) -> None:
    """Reject missing data before many runs start."""
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(config)
        contract.prepare(task, _data_folder(config, Path(folder)), preview=True)


def open_fit(run: Run, fold: int = 0) -> tuple[Task, nn.Module]:
    """Load a run's prepared task and the best network of a fold.

    Raises:
        InputError: the run has no such network, or a damaged one.
    """
    if not _network_file(run, fold).is_file():
        raise InputError(f"{run.path}: expected a network of fold {fold}, got none")
    config = FitConfig.from_plain(run.config)
    task = make_task(config)
    contract.prepare(task, _data_folder(config, run.path))
    return task, _best_network(run, task, config.seed, fold)


def fingerprint(task: Task) -> dict[str, float]:
    """Return numbers by which other data of a prepared task are recognized.

    They are the sizes of the splits, and the mean magnitude in each dense real tensor
    of a batch.
    """

    def means() -> dict[str, float]:
        return {
            f"the mean |{name}| of the first {split} rows": float(
                tensor.double().nan_to_num().abs().mean()
            )
            for split, count in counts.items()
            for name, tensor in contract.batch(
                task, split, torch.arange(min(count, FIRST_ROWS))
            ).items()
            if tensor.layout == torch.strided and not tensor.is_nested
            if not tensor.is_complex()
        }

    # A task's counts may be NumPy's.
    counts: dict[Split, int] = {
        "train": int(task.num_train),
        "test": int(task.num_test),
    }
    # A task may augment its examples at random: compare what is the same twice.
    with seeded(0, "fingerprint"):
        first, second = means(), means()
    same = {name: value for name, value in first.items() if second.get(name) == value}
    return {f"num_{split}": count for split, count in counts.items()} | same


def validate_same_data(checkpoint: Path, data: Mapping[str, float], key: str) -> None:
    """Reject other data than a checkpoint's; earlier versions stored none."""
    try:
        stored = json.loads((checkpoint / PROGRESS).read_text()).get("data", {})
        changed = [
            f"{name} {value:.6g}, got {data[name]:.6g}"
            for name, value in stored.items()
            # Another machine may round otherwise.
            if name in data and not math.isclose(value, data[name], rel_tol=1e-3)
        ]
    except (ValueError, TypeError, AttributeError, OSError):
        return  # `restore` reports the damage
    if changed:
        raise InputError(f"{key}: expected the data of {checkpoint}, with {changed[0]}")


def _best_network(run: Run, task: Task, seed: int, fold: int) -> nn.Module:
    file = _network_file(run, fold)
    network = compile_parts(initial_network(task, seed, fold))
    validate_intact(file.parent, only=file.name)
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(f"{file} cannot be read: {one_line(error)}") from error
    return network.eval()


class FitMethod(TrainingMethod):
    """k-fold fit of a task's network; an iteration is an epoch.

    Each fold trains a separate network on k - 1 parts of the training examples and
    keeps the weights with the lowest validation metric on the remaining part. These
    are measured on the hold-out test set; results are means over folds.
    """

    unit = "epochs"

    def __init__(self, run: Run, config: FitConfig, checkpoint: Path | None) -> None:
        super().__init__(run, config.fit.folds * config.fit.epochs)
        self.config, self.settings = config, config.fit
        checked_device(config.device)
        self.task = make_task(config)
        contract.prepare(self.task, _data_folder(config, run.path))
        self.data = fingerprint(self.task)
        if checkpoint is not None:
            key = "task" if config.data_dir is None else "data_dir"
            validate_same_data(checkpoint, self.data, key)
        self.results: list[FoldResult] = []
        self._begin(0)

    def _begin(self, fold: int) -> None:
        self.fold = fold
        self.learner = FoldLearner(self.task, self.config, fold)

    @property
    @override
    def done(self) -> int:
        learner = self.learner
        return self.settings.epochs_over(self.fold, learner.epoch, learner.seconds)

    @property
    @override
    def round_is_over(self) -> bool:
        return self.fold == self.settings.folds - 1 and self.learner.is_done

    @property
    @override
    def is_due(self) -> bool:
        return self.learner.is_done

    @override
    def where(self, iteration: int) -> str:
        return f"fold {self.fold}"

    # Epochs

    @override
    def rounds(self) -> Iterator[None]:
        if not self.done:
            print(estimate(self.task, self.config), flush=True)
        yield
        self._end_fold()
        self._write_results()

    @override
    def step(self, iteration: int) -> Iteration:
        # End a fold here, not after its last epoch, so a killed run tests it again.
        if self.learner.is_done:
            self._end_fold()
            self._begin(self.fold + 1)
        learner = self.learner
        learned = learner.learn(learner.rows.train)
        measured = learner.measure("train", learner.rows.validation)
        metrics = {
            **learned.means,
            **{VALIDATION + name: value for name, value in measured.means.items()},
        }
        if faults := _not_finite(metrics):
            raise StepError(faults)
        # Keep the best weights, or return to them.
        learner.end_epoch(measured.means[self.task.metric])
        row = {
            "fold": self.fold,
            "epoch": learner.epoch,
            "step": learner.step,
            **metrics,
            "lr": learner.lr,
            "seconds": learner.seconds,
            "samples_per_second": learned.examples / learned.seconds,
            "measured_per_second": measured.examples / measured.seconds,
        }
        columns = ("loss", VALIDATION + self.task.metric, "samples_per_second")
        return Iteration(row, {name: row[name] for name in columns})

    def _end_fold(self) -> None:
        """Measure the best network of the fold on the test set, and save it."""
        learner = self.learner
        learner.network.load_state_dict(learner.best)
        test = learner.measure("test", torch.arange(self.task.num_test))
        file = _network_file(self.run, self.fold)
        with writing(self.run, self.where(0), "the network"):
            make_folder(file.parent)
            write_tensors(learner.best, file)
            add_to_manifest(file.parent, file.name)
        means, place = _finite(test.means), f"{self.where(0)}: on the test set"
        if faults := _not_finite(test.means):
            # A fit without its own metric has no result.
            if self.task.metric not in means:
                raise stopped_error(self.run, place, faults)
            print_line(f"{place}: {faults}: left out of the results")
        self.results.append(
            FoldResult(
                fold=self.fold,
                epochs=learner.epoch,
                best_epoch=learner.best_epoch + 1,
                steps=learner.step,
                seconds=learner.seconds,
                validation=min(learner.losses),
                test=means,
            )
        )

    def _write_results(self) -> None:
        """Score baselines, plot pictures of the first fold and write all results."""
        network = _best_network(self.run, self.task, self.config.seed, 0)
        baselines, pictures = dict[str, float](), list[Path]()
        # A failure of either must not lose the numbers.
        with _noting("pictures"):
            folder = self.run.path / PICTURES
            make_folder(folder)
            generator = generator_of(self.config.seed, "pictures")
            pictures += contract.finish(self.task, network, folder, generator)
        with _noting("baselines"):
            baselines = self._baselines()
        with writing(self.run, self.where(0), "the results"):
            document = write_results(
                self.run,
                self.results,
                pictures,
                metric=self.task.metric,
                parameters=sum(parameter.numel() for parameter in network.parameters()),
                num_test=int(self.task.num_test),
                baselines=baselines,
            )
        print(results_table(document), flush=True)

    def _baselines(self) -> dict[str, float]:
        means = Means()
        for rows in torch.arange(self.task.num_test).split(self.settings.batch_size):
            batch = contract.batch(self.task, "test", rows)
            scores = contract.baselines(self.task, batch, examples=len(rows))
            if not scores:
                return {}
            means.add(scores)
        baselines = means.means()
        if faults := _not_finite(baselines):
            print_line(f"baselines: {faults}: left out of the results")
        return _finite(baselines)

    # Checkpoints

    @override
    def save(self, checkpoint: Path) -> None:
        self.learner.save(checkpoint)
        results = list(map(asdict, self.results))
        state = {"fold": self.fold, "results": results, "data": self.data}
        write_json(checkpoint / PROGRESS, state)

    @override
    def restore(self, checkpoint: Path) -> None:
        state = json.loads((checkpoint / PROGRESS).read_text())
        self.results = [FoldResult(**fold) for fold in state["results"]]
        self._begin(state["fold"])
        self.learner.restore(checkpoint)


def _not_finite(metrics: dict[str, float]) -> str:
    """Name the metrics that are not finite, with their values."""
    return ", ".join(
        f"{name} is {value}"
        for name, value in metrics.items()
        if not math.isfinite(value)
    )


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@contextmanager
def _noting(item: str) -> Iterator[None]:
    """Print that an item is missing, in place of an exception."""
    try:
        yield
    except InputError as error:
        print_line(f"no {item}: {error}")
    except Exception as error:
        print_line(f"no {item}: {described(error)}")


def _network_file(run: Run, fold: int) -> Path:
    return run.path / NETWORKS / f"fold_{fold}.safetensors"


def _data_folder(config: FitConfig, run: Path) -> Path:
    data_dir = config.data_dir
    return run / DATA if data_dir is None else user_path(data_dir)
