"""``results.json`` of a supervised run: each fold, and their mean and spread."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from marl_pool.files.atomic import write_json
from marl_pool.files.manifest import is_intact_json, sealed_json
from marl_pool.files.reading import read_json
from marl_pool.runs.run import CONFIG, Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import quoted

FILE = "results.json"


@dataclass(frozen=True)
class FoldResult:
    """Results of one fold, numbered from 0."""

    fold: int
    epochs: int
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


def write_results(
    run: Run,
    folds: Sequence[FoldResult],
    pictures: Sequence[Path],
    **entries: Any,
) -> dict[str, Any]:
    """Write the results of a run, with additional ``entries``; return the document."""

    def over_folds(statistic: Callable[[list[float]], float]) -> dict[str, float]:
        # A fold lacks metrics that were not finite.
        names = [k for k in folds[0].test if all(k in fold.test for fold in folds)]
        return {k: statistic([fold.test[k] for fold in folds]) for k in names}

    document = {
        **{
            key: run.config[key]
            for key in ("task", "encoder", "pooling", "scale", "seed")
        },
        "package_version": run.version,
        "config_digest": run.config_digest,
        **entries,
        "folds": [asdict(fold) for fold in folds],
        "mean": over_folds(mean),
        "sd_over_folds": over_folds(stdev) if len(folds) > 1 else None,
        "pictures": [str(path.relative_to(run.path)) for path in pictures],
    }
    write_json(run.path / FILE, sealed_json(document), indent=1)
    return document


def results_table(document: Mapping[str, Any]) -> str:
    """Format written results as lines of text."""
    spread, folds = document["sd_over_folds"], len(document["folds"])
    over = f"mean of {folds} folds ± sd over folds" if spread else "one fold"
    lines = [f"{document['parameters']:,} parameters; test set, {over}"]
    for name, value in document["mean"].items():
        sd = f" ± {spread[name]:.4g}" if spread else ""
        lines.append(f"  {name:<24} {value:.5g}{sd}")
    for name, value in document["baselines"].items():
        label = f"baseline {name}: {document['metric']}"
        lines.append(f"  {label:<24} {value:.5g}")
    return "\n".join(lines)


def read_results(run: Path) -> dict[str, Any]:
    """Read the results of a finished run.

    Raises:
        InputError: no results, or damaged ones.
    """
    file = run / FILE
    try:
        document = read_json(file)
        if missing := {"task", "mean"} - document.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        if not is_intact_json(document):
            raise ValueError(
                "it has changed since it was written: its checksum differs"
            )
    except FileNotFoundError as error:
        raise InputError(
            f"{run}: expected {FILE}, got none; continue with: marl-pool resume "
            f"{quoted(run)}"
        ) from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return dict(document)


def read_study(
    folder: Path, tasks: Collection[str] | None = None
) -> dict[Path, dict[str, Any]]:
    """Read the results of all finished runs in a folder, by the runs' folders.

    ``tasks`` holds the permitted names of tasks, of which the folder must have only
    one; by default all are permitted, also together.

    Raises:
        InputError: no finished run, a damaged one, one of another task, or several
            tasks.
    """
    runs = {
        config.parent: read_results(config.parent)
        for config in sorted(folder.rglob(CONFIG))
        if (config.parent / FILE).is_file()
    }
    if not runs:
        raise InputError(f"{folder}: expected finished runs of fit, got none")
    for run, results in runs.items():
        name = results["task"]["name"]
        if tasks is not None and name not in tasks:
            raise InputError(
                f"{run}: expected a run of task={' or task='.join(tasks)}, got {name}"
            )
    names = list(dict.fromkeys(results["task"]["name"] for results in runs.values()))
    if tasks is not None and len(names) > 1:
        raise InputError(
            f"{folder}: expected runs of one task, got {' and '.join(names)}"
        )
    return runs
