"""The jobs of the verbs that make runs: functions, units and amounts."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_pool.runs import Run
from marl_pool.training.supervised.results import FILE
from marl_pool.training.supervised.settings import FitSettings


@dataclass(frozen=True)
class Job:
    """Description of the runs that a verb makes.

    Attributes:
        function: ``module:function``, called with the run, its configuration as plain
            data and, by keyword, ``should_stop``.
        unit: name of what is counted.
        count: amount at a row of ``metrics.csv``, given that row and the configuration.
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
        """Return the amount of a whole run, at most."""
        product = 1
        for key in self.limits:
            value: Any = config
            for part in key.split("."):
                value = value[part]
            product *= value
        return product

    def saved(self, run: Run) -> int:
        """Return the amount up to the checkpoint from which a run is resumed."""
        row = run.saved()
        return self._counted(run, [row] if row else [])

    def logged(self, run: Run | None) -> int:
        """Return the amount in a run's metrics or, if damaged, up to its checkpoint."""
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


JOBS = {
    "train": Job(
        "marl_pool.training.ppo:train",
        "steps",
        _in_column("env_steps"),
        ("total_steps",),
        ("total_steps", "time_limit", "checkpoint", "resources"),
    ),
    "evolve": Job(
        "marl_pool.training.evolution.evolve:evolve",
        "generations",
        _in_column("iteration"),
        ("total_generations",),
        ("total_generations", "time_limit", "checkpoint", "resources"),
    ),
    "clone": Job(
        "marl_pool.training.cloning.clone:clone",
        "batches",
        _in_column("batches"),
        ("total_batches",),
        ("total_batches", "time_limit", "checkpoint"),
    ),
    "fit": Job(
        "marl_pool.training.supervised.fit:fit",
        "epochs",
        _epochs,
        ("fit.folds", "fit.epochs"),
        ("time_limit", "checkpoint", "data_dir", "threads", "device"),
        FILE,
    ),
}
"""Jobs by verb."""
