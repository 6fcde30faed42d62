"""``results.json`` of a supervised run: each fold, and their mean and spread."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from marl_pool.runs import Run
from marl_pool.utils.atomic import new_file
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import is_intact_json, sealed_json
from marl_pool.utils.reading import read_json

FILE = "results.json"
COPIED = ("task", "encoder", "pooling", "scale", "seed")
"""Keys of the configuration that are copied to the file."""


@dataclass(frozen=True)
class FoldResult:
    """Results of one fold."""

    fold: int
    """Number of the fold, from 0."""
    epochs: int
    """Number of epochs."""
    best_epoch: int
    """Epoch of the lowest validation metric, from 1."""
    steps: int
    """Gradient steps."""
    seconds: float
    """Seconds of training."""
    validation: float
    """Lowest validation metric."""
    test: dict[str, float]
    """The best network's metrics on the hold-out test set."""


class Results:
    """Results of a run, one fold after the other.

    Args:
        run: receives the file.
        metric: name of the metric that validation minimises.
    """

    def __init__(self, run: Run, metric: str) -> None:
        self.run, self.metric = run, metric
        self.folds: list[FoldResult] = []
        self.document: dict[str, Any] = {}

    def add(self, fold: FoldResult) -> None:
        """Add a completed fold."""
        self.folds.append(fold)

    def as_data(self) -> list[dict[str, Any]]:
        """Return the folds as plain data, for `restore`."""
        return [asdict(fold) for fold in self.folds]

    def restore(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Restore folds from `as_data`."""
        self.folds = [FoldResult(**fold) for fold in data]

    def write(
        self,
        parameters: int,
        num_test: int,
        baselines: Mapping[str, float],
        pictures: Sequence[Path],
    ) -> None:
        """Write the file.

        Args:
            parameters: number of the network's parameters.
            num_test: examples of the test set.
            baselines: metric of naive predictors on the test set, by name.
            pictures: files of `Task.finish`.
        """
        self.document = {
            **{key: self.run.config[key] for key in COPIED},
            "package_version": self.run.version,
            "config_digest": self.run.config_digest,
            "metric": self.metric,
            "parameters": parameters,
            "num_test": num_test,
            "folds": self.as_data(),
            "mean": self._over_folds(mean),
            "sd_over_folds": self._over_folds(stdev) if len(self.folds) > 1 else None,
            "baselines": dict(baselines),
            "pictures": [str(path.relative_to(self.run.path)) for path in pictures],
        }
        with new_file(self.run.path / FILE) as out:
            json.dump(sealed_json(self.document), out, indent=1)

    def _over_folds(self, statistic: Any) -> dict[str, float]:
        names = self.folds[0].test
        return {name: statistic([f.test[name] for f in self.folds]) for name in names}

    def table(self) -> str:
        """Format the written results as lines of text."""
        found = self.document
        spread = found["sd_over_folds"] or {}
        folds = len(self.folds)
        lines = [
            f"{found['parameters']:,} parameters; test set, "
            + (f"mean of {folds} folds ± sd over folds" if folds > 1 else "one fold")
        ]
        for name, value in found["mean"].items():
            sd = f" ± {spread[name]:.4g}" if spread else ""
            lines.append(f"  {name:<24} {value:.5g}{sd}")
        for name, value in found["baselines"].items():
            label = f"baseline {name}: {self.metric}"
            lines.append(f"  {label:<24} {value:.5g}")
        return "\n".join(lines)


def read_results(run: Path) -> dict[str, Any]:
    """Read the results of a finished run.

    Raises:
        InputError: no results, or damaged ones.
    """
    file = run / FILE
    try:
        found = read_json(file)
        if missing := {"task", "mean"} - found.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        if not is_intact_json(found):
            raise ValueError(
                "it has changed since it was written: its checksum differs"
            )
    except FileNotFoundError as error:
        raise InputError(
            f"{run}: expected {FILE}, got none; continue by: marl-pool resume {run}"
        ) from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return dict(found)


def read_study(
    folder: Path, tasks: Collection[str] | None = None
) -> dict[Path, dict[str, Any]]:
    """Read the results of all finished runs in a folder, by the runs' folders.

    Args:
        folder: folder of a sweep or of runs.
        tasks: permitted names of tasks; None: any.

    Raises:
        InputError: no finished run, a damaged one, or one of another task.
    """
    found = {
        config.parent: read_results(config.parent)
        for config in sorted(folder.rglob("config.yaml"))
        if is_finished(config.parent)
    }
    if not found:
        raise InputError(f"{folder}: expected finished runs of fit, got none")
    for run, results in found.items():
        name = results["task"]["name"]
        if tasks is not None and name not in tasks:
            raise InputError(
                f"{run}: expected a run of task={' or task='.join(tasks)}, got {name}"
            )
    return found


def is_finished(run: Path) -> bool:
    """Return True if a run has written its results."""
    return (run / FILE).is_file()
