"""The driver: folds, epochs, measuring, the log, checkpoints, results."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from marl_pool.atomic import make_folder, new_file
from marl_pool.construction import build
from marl_pool.errors import InputError
from marl_pool.manifest import add_to_manifest
from marl_pool.progress import Progress
from marl_pool.runs import PARTS, Run
from marl_pool.training.interrupt import Interruptible
from marl_pool.training.state import write_tensors
from marl_pool.training.stopping import (
    checkpoint_to_resume,
    reading,
    stopped,
    trim_log,
    writing,
)
from marl_pool.training.supervised.cost import Cost, estimate
from marl_pool.training.supervised.folds import (
    Fold,
    fold_rows,
    generator_of,
    network_seed,
)
from marl_pool.training.supervised.learner import (
    Learner,
    Means,
    Measured,
    is_finite,
)
from marl_pool.training.supervised.results import FoldResult, Results, epochs_over
from marl_pool.training.supervised.saving import (
    load_learner,
    load_network,
    save_learner,
)
from marl_pool.training.supervised.settings import FitSettings
from marl_pool.training.supervised.task import Task
from marl_pool.training.supervised.tasks import TASKS

PROGRESS, NETWORKS, PICTURES, DATA = "progress.json", "networks", "pictures", "data"


def fit(
    run: Run,
    config: Mapping[str, Any],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fit the network of each fold, measure the best of each, write results.

    It goes on from the last checkpoint, if there is one.

    Args:
        run: takes metrics, checkpoints, networks, pictures and ``results.json``.
        config: composed and checked, as in ``run.config``.
        should_stop: asked after each epoch; True saves the run and ends it.

    Raises:
        InputError: parts of the configuration that don't fit each other, or data that
            are not there.
        StoppedError: the loss was not finite, or the disk is full.
    """
    torch.set_num_threads(config["threads"])
    driver = Driver(run, config, should_stop)
    if config != run.config:
        run.write_config(config)
    driver.loop()


def make_task(config: Mapping[str, Any]) -> Task:
    """Build the task of a checked configuration; it is not prepared yet.

    Raises:
        InputError: options that don't fit each other.
    """
    options = dict(config["task"])
    context = {part: _part(config[part]) for part in ("encoder", "pooling")}
    context |= {key: config["fit"][key] for key in ("dropout", "init_std")}
    context |= {key: config[key] for key in ("data_dir", "download")}
    task: Task = build(options.pop("name"), TASKS, "task", Task, options, context)
    return task


def price(config: Mapping[str, Any], folder: Path) -> Cost:
    """What a run would cost, from a few batches of it.

    Args:
        config: composed and checked.
        folder: for data that have to be made.

    Raises:
        InputError: see `fit`.
    """
    torch.set_num_threads(config["threads"])
    refuse_missing_gpu(config)
    task = make_task(config)
    task.preview(_data_folder(config, folder))
    return _cost(task, config)


def refuse_missing_data(config: Mapping[str, Any]) -> None:
    """Refuse data that are not there, before many runs look for them.

    Raises:
        InputError: see `fit`.
    """
    with tempfile.TemporaryDirectory() as folder:
        make_task(config).preview(_data_folder(config, Path(folder)))


def refuse_missing_gpu(config: Mapping[str, Any]) -> None:
    """Refuse a CUDA device that there is not.

    Raises:
        InputError: it would fail deep inside torch.
    """
    device, there = torch.device(config["device"]), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        best = f"at most cuda:{there - 1}" if there else "cpu, for there is no GPU"
        raise InputError(f"device: expected {best}, got {device}")


def open_fit(run: Run, fold: int = 0) -> tuple[Task, nn.Module]:
    """Build a run's task again, prepared, and the best network of a fold.

    Raises:
        InputError: the run has no such network.
    """
    file = run.path / NETWORKS / f"fold_{fold}.safetensors"
    if not file.is_file():
        raise InputError(f"{run.path} has no network of fold {fold} yet")
    task = make_task(run.config)
    task.prepare(_data_folder(run.config, run.path))
    network = task.make_network(network_seed(run.config["seed"], fold))
    load_network(network, file)
    return task, network.eval()


class Driver:
    """One process's work on one run.

    Args:
        run: takes the results.
        config: of the run.
        should_stop: see `fit`.

    Raises:
        InputError: see `fit`.
    """

    def __init__(
        self, run: Run, config: Mapping[str, Any], should_stop: Callable[[], bool]
    ) -> None:
        self.run, self.config, self.should_stop = run, config, should_stop
        self.settings = FitSettings(**config["fit"])
        refuse_missing_gpu(config)
        self.task = make_task(config)
        self.task.prepare(_data_folder(config, run.path))
        self._rows(0)  # refuses what no fold can be split into
        self.results = Results(run, self.task.metric)
        self.iteration = self.fold = 0
        self.ctrl_c = Interruptible()

    def loop(self) -> None:
        """Fit fold after fold; see `fit`."""
        began = time.monotonic()
        learner = self._resume()
        if not self.iteration:
            print(_cost(self.task, self.config), flush=True)
        total = self.settings.folds * self.settings.epochs
        with (
            Progress(total, unit="epochs", done=self._reached(learner)) as progress,
            self.ctrl_c,
        ):
            while self.fold < self.settings.folds:
                learner = learner or self._learner()
                if self._must_stop_in_fold(learner, progress, began):
                    break
                self._end_fold(learner)
                learner, self.fold = None, self.fold + 1
        if self.ctrl_c.asked:
            raise KeyboardInterrupt
        if self.fold == self.settings.folds:
            self._finish()

    def _learner(self) -> Learner:
        return Learner(
            self.task,
            self.settings,
            seed=self.config["seed"],
            number=self.fold,
            device=self.config["device"],
        )

    def _rows(self, number: int) -> Fold:
        return fold_rows(
            self.task.num_train, number, self.config["seed"], self.settings
        )

    def _must_stop_in_fold(
        self, learner: Learner, progress: Progress, began: float
    ) -> bool:
        """Learn until the fold is over, or the run has to stop: then return True."""
        rows, every = self._rows(self.fold), self.config["checkpoint"]["every"]
        limit = self.config["time_limit"]
        while not learner.is_done:
            learned = learner.learn(rows.train)
            measured = learner.measure("train", rows.validation)
            if not is_finite(learned) or not is_finite(measured):
                raise stopped(self.run, f"fold {self.fold}", "the loss is not finite")
            learner.end_epoch(measured.means[self.task.metric])
            self.iteration += 1
            row = self._row(learner, learned, measured)
            with self._writing("metrics.csv"):
                self.run.log(row)
            shown = ("loss", f"validation_{self.task.metric}", "samples_per_second")
            progress.update(
                self._reached(learner), **{name: row[name] for name in shown}
            )
            late = limit is not None and time.monotonic() - began >= limit
            stop = late or self.ctrl_c.asked or self.should_stop()
            if stop or learner.is_done or self.iteration % every == 0:
                self._save(learner)
            if stop:
                return True
        return False

    def _reached(self, learner: Learner | None) -> int:
        """Epochs that are over, of all folds; see `epochs_over`."""
        epoch, seconds = (learner.epoch, learner.seconds) if learner else (0, 0.0)
        row = {"fold": self.fold, "epoch": epoch, "seconds": seconds}
        return epochs_over(row, self.config)

    def _row(
        self, learner: Learner, learned: Measured, measured: Measured
    ) -> dict[str, float]:
        return {
            "iteration": self.iteration,
            "fold": self.fold,
            "epoch": learner.epoch,
            "step": learner.step,
            **learned.means,
            **{f"validation_{name}": each for name, each in measured.means.items()},
            "lr": learner.lr,
            "seconds": learner.seconds,
            "samples_per_second": learned.examples / learned.seconds,
            "measured_per_second": measured.examples / measured.seconds,
        }

    def _end_fold(self, learner: Learner) -> None:
        """Measure the best network of a fold on the test set, and keep it."""
        learner.network.load_state_dict(learner.best)
        test = learner.measure("test", torch.arange(self.task.num_test))
        folder = self.run.path / NETWORKS
        with self._writing("the network"):
            make_folder(folder)
            write_tensors(learner.best, folder / f"fold_{self.fold}.safetensors")
            add_to_manifest(folder, f"fold_{self.fold}.safetensors")
        self.results.add(
            FoldResult(
                fold=self.fold,
                epochs=learner.epoch,
                best_epoch=learner.best_epoch + 1,
                steps=learner.step,
                seconds=learner.seconds,
                validation=learner.losses[learner.best_epoch],
                test=test.means,
            )
        )

    def _finish(self) -> None:
        """Baselines, pictures, results."""
        network = self.task.make_network(self.config["seed"])
        load_network(network, self.run.path / NETWORKS / "fold_0.safetensors")
        folder = self.run.path / PICTURES
        with self._writing("the results"):
            make_folder(folder)
            generator = generator_of(self.config["seed"], "pictures")
            self.results.write(
                parameters=sum(each.numel() for each in network.parameters()),
                num_test=self.task.num_test,
                baselines=self._baselines(),
                pictures=self.task.finish(network.eval(), folder, generator),
            )
        print(self.results.table(), flush=True)

    def _baselines(self) -> dict[str, float]:
        means = Means()
        for rows in torch.arange(self.task.num_test).split(self.settings.batch_size):
            found = self.task.baselines(self.task.batch("test", rows))
            if not found:
                return {}
            means.add(found)
        return means.means()

    def _save(self, learner: Learner) -> None:
        with self._writing("the checkpoint"):
            with self.run.checkpoint(self.iteration, PARTS["fit"]) as folder:
                save_learner(learner, folder)
                state = {"fold": self.fold, "results": self.results.as_data()}
                with new_file(folder / PROGRESS) as out:
                    json.dump(state, out)
            self.run.prune(self.config["checkpoint"]["keep"])

    def _resume(self) -> Learner | None:
        checkpoint, learner = checkpoint_to_resume(self.run), None
        if checkpoint is not None:
            with reading(self.run, checkpoint):
                state = json.loads((checkpoint / PROGRESS).read_text())
                self.fold = state["fold"]
                self.results.restore(state["results"])
                learner = self._learner()
                load_learner(learner, checkpoint)
        self.iteration = self.run.iterations_saved
        with self._writing("metrics.csv"):
            trim_log(self.run, self.iteration)
        return learner

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(self.run, f"fold {self.fold}", what)


def _cost(task: Task, config: Mapping[str, Any]) -> Cost:
    settings = FitSettings(**config["fit"])
    rows = fold_rows(task.num_train, 0, config["seed"], settings)
    learner = Learner(task, settings, seed=0, number=0, device=config["device"])
    return estimate(learner, rows, task.num_test)


def _part(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if section["name"] == "none" else section


def _data_folder(config: Mapping[str, Any], run: Path) -> Path:
    given = config["data_dir"]
    return run / DATA if given is None else Path(given).expanduser()
