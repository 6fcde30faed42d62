"""Jobs: the training function of each verb, and the amount of training in a run."""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_pool.runs import Run
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.settings import EvolveConfig, TrainConfig
from marl_pool.training.supervised.results import FILE
from marl_pool.training.supervised.settings import FitConfig

Row = Mapping[str, Any]
"""Row of ``metrics.csv``."""


@dataclass(frozen=True)
class Job:
    """Training of the runs that a verb makes.

    Attributes:
        function: ``module:function``, called with the run, its configuration as plain
            data and, by keyword, ``should_stop``.
        config: class of the typed configuration, a `RunConfig`.
        unit: name of the amount of training.
        count: amount up to a row, computed from the row and the configuration.
        limit: amount of a whole run, computed from the configuration.
        controls: keys, and sections of keys, that ``resume`` may change.
        result: file whose existence marks a run as finished, whatever the count;
            empty if the count decides.
    """

    function: str
    config: type[Any]
    unit: str
    count: Callable[[Row, Any], int]
    limit: Callable[[Any], int]
    controls: tuple[str, ...]
    result: str = ""

    def load(self) -> Callable[..., None]:
        """Import the function, which may load torch and ray."""
        found: Callable[..., None] = pkgutil.resolve_name(self.function)
        return found

    def total(self, config: Mapping[str, Any]) -> int:
        """Return the largest amount of a run with this configuration."""
        return self.limit(self.config.from_plain(config))

    def saved(self, run: Run) -> int:
        """Return the amount up to the checkpoint that a run is resumed from."""
        row = run.saved()
        return self._counted(run, [row] if row else [])

    def logged(self, run: Run | None) -> int:
        """Return the amount in a run's metrics or, if damaged, in its checkpoint."""
        if run is None:
            return 0
        if run.metrics_problem():
            return self.saved(run)
        return self._counted(run, run.metrics.readable_rows())

    def _counted(self, run: Run, rows: Sequence[Row]) -> int:
        config = self.config.from_plain(run.config)
        total = self.limit(config)
        if self.result and (run.path / self.result).is_file():
            return total
        count = self.count(rows[-1], config) if rows else 0
        return min(count, total - 1) if self.result else count


def _in_column(name: str) -> Callable[[Row, Any], int]:
    return lambda row, config: int(row[name])


def _epochs(row: Row, config: FitConfig) -> int:
    return config.fit.epochs_over(row["fold"], row["epoch"], row["seconds"])


JOBS = {
    "train": Job(
        "marl_pool.training.ppo:train",
        TrainConfig,
        "steps",
        _in_column("env_steps"),
        lambda config: config.total_steps,
        (
            *("total_steps", "time_limit", "env_timeout"),
            *("checkpoint", "storage", "callbacks", "resources"),
        ),
    ),
    "evolve": Job(
        "marl_pool.training.evolution.evolve:evolve",
        EvolveConfig,
        "generations",
        _in_column("iteration"),
        lambda config: config.total_generations,
        (
            *("total_generations", "time_limit", "env_timeout"),
            *("checkpoint", "storage", "callbacks", "resources"),
        ),
    ),
    "clone": Job(
        "marl_pool.training.cloning.clone:clone",
        CloneConfig,
        "batches",
        _in_column("batches"),
        lambda config: config.total_batches,
        (
            *("total_batches", "time_limit", "env_timeout"),
            *("checkpoint", "storage", "callbacks"),
        ),
    ),
    "fit": Job(
        "marl_pool.training.supervised.fit:fit",
        FitConfig,
        "epochs",
        _epochs,
        lambda config: config.fit.folds * config.fit.epochs,
        (
            *("time_limit", "checkpoint", "storage", "callbacks"),
            *("data_dir", "threads", "kernels", "device"),
        ),
        FILE,
    ),
}
"""Jobs by verb."""
