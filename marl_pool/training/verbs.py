"""The verbs that make runs: who does the work, and how much of it there is."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from marl_pool.runs import Run
from marl_pool.training.supervised.results import FILE


@dataclass(frozen=True)
class Work:
    """What a verb's runs consist of.

    Attributes:
        function: ``module:function`` that does it, called with the run, its
            configuration and, by keyword, ``should_stop``.
        unit: what is counted.
        column: of ``metrics.csv`` that counts it.
        limits: keys whose product says when a run is done.
        controls: keys, with those below them, that ``resume`` may change.
        result: file in the run's folder without which a run is not done, and with
            which it is, whatever the count; or nothing.
    """

    function: str
    unit: str
    column: str
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
        return self._counted(run, run.saved(self.column))

    def logged(self, run: Run | None) -> int:
        """How much a run has done, as its metrics say."""
        if run is None:
            return 0
        rows = run.rows()
        return self._counted(run, int(rows[-1][self.column]) if rows else 0)

    def _counted(self, run: Run, count: int) -> int:
        if not self.result:
            return count
        total = self.total(run.config)
        return total if (run.path / self.result).is_file() else min(count, total - 1)


WORKS = {
    "train": Work(
        "marl_pool.training.ppo:train",
        "steps",
        "env_steps",
        ("total_steps",),
        ("total_steps", "time_limit", "checkpoint", "resources"),
    ),
    "evolve": Work(
        "marl_pool.training.evolution.evolve:evolve",
        "generations",
        "iteration",
        ("total_generations",),
        ("total_generations", "time_limit", "checkpoint", "resources"),
    ),
    "clone": Work(
        "marl_pool.training.cloning.clone:clone",
        "batches",
        "batches",
        ("total_batches",),
        ("total_batches", "time_limit", "checkpoint"),
    ),
    "fit": Work(
        "marl_pool.training.supervised.fit:fit",
        "epochs",
        "reached",
        ("fit.folds", "fit.epochs"),
        ("time_limit", "checkpoint", "data_dir", "threads", "device"),
        FILE,
    ),
}
"""By verb."""
