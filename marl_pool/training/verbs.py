"""The verbs that make runs: who does the work, and how much of it there is."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_pool.runs import Run
from marl_pool.training.supervised.results import FILE
from marl_pool.training.supervised.settings import FitSettings


@dataclass(frozen=True)
class Work:
    """What a verb's runs consist of.

    Attributes:
        function: ``module:function`` that does it, called with the run, its
            configuration and, by keyword, ``should_stop``.
        unit: what is counted.
        count: how much of it there was at a row of ``metrics.csv``, given that row and
            the configuration.
        limits: keys whose product says when a run is done.
        controls: keys, with those below them, that ``resume`` may change.
        result: file in the run's folder without which a run is not done, and with
            which it is, whatever the count; or nothing.
    """

    function: str
    unit: str
    count: Callable[[Mapping[str, Any], Mapping[str, Any]], int]
    limits: tuple[str, ...]
    controls: tuple[str, ...]
    result: str = ""

    def load(self) -> Callable[..., None]:
        """Import the function."""
        module, _, name = self.function.partition(":")
        found: Callable[..., None] = getattr(importlib.import_module(module), name)
        return found

    def total(self, config: Mapping[str, Any]) -> int:
        """How much a run has to do, at most."""
        product = 1
        for key in self.limits:
            value: Any = config
            for part in key.split("."):
                value = value[part]
            product *= value
        return product

    def saved(self, run: Run) -> int:
        """How much a run has done, up to the checkpoint from which it goes on."""
        row = run.saved()
        return self._counted(run, [row] if row else [])

    def logged(self, run: Run | None) -> int:
        """How much a run has done, as its metrics say, or damaged ones' checkpoint."""
        if run is None:
            return 0
        if run.metrics_problem():
            return self.saved(run)
        return self._counted(run, run.metrics.readable_rows())

    def _counted(self, run: Run, rows: Sequence[Mapping[str, Any]]) -> int:
        total = self.total(run.config)
        if self.result and (run.path / self.result).is_file():
            return total
        count = self.count(rows[-1], run.config) if rows else 0
        return min(count, total - 1) if self.result else count


def _in_column(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], int]:
    return lambda row, config: int(row[name])


def _epochs(row: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    settings = FitSettings(**config["fit"])
    return settings.epochs_over(row["fold"], row["epoch"], row["seconds"])


WORKS = {
    "train": Work(
        "marl_pool.training.ppo:train",
        "steps",
        _in_column("env_steps"),
        ("total_steps",),
        ("total_steps", "time_limit", "checkpoint", "resources"),
    ),
    "evolve": Work(
        "marl_pool.training.evolution.evolve:evolve",
        "generations",
        _in_column("iteration"),
        ("total_generations",),
        ("total_generations", "time_limit", "checkpoint", "resources"),
    ),
    "clone": Work(
        "marl_pool.training.cloning.clone:clone",
        "batches",
        _in_column("batches"),
        ("total_batches",),
        ("total_batches", "time_limit", "checkpoint"),
    ),
    "fit": Work(
        "marl_pool.training.supervised.fit:fit",
        "epochs",
        _epochs,
        ("fit.folds", "fit.epochs"),
        ("time_limit", "checkpoint", "data_dir", "threads", "device"),
        FILE,
    ),
}
"""By verb."""
