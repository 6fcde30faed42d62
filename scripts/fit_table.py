"""Print a sweep of supervised runs as a Markdown table, a row for each finished run.

    python scripts/fit_table.py SWEEP [--metrics error cross_entropy]

Numbers are means over folds on the test set ± standard deviation over *folds*, which
share most of their examples: no spread over seeds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marl_pool.errors import InputError
from marl_pool.runs import Run
from marl_pool.sweeps import Sweep
from marl_pool.training.supervised.results import read_study

COUNTED = ("epochs", "seconds")
"""Numbers of a fold whose mean is shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--metrics", nargs="+", help="columns; default: all metrics")
    given = parser.parse_args(arguments)
    try:
        print("\n".join(table(given.sweep, given.metrics)))
    except InputError as error:
        print(f"fit_table: {error}", file=sys.stderr)
        return 2
    return 0


def table(sweep: Path, metrics: Sequence[str] | None) -> list[str]:
    """The lines of the table.

    Raises:
        InputError: no sweep, no finished run, or a metric that the runs don't have.
    """
    keys = list(Sweep.open(sweep).grid)
    found = read_study(sweep)
    known = list(dict.fromkeys(name for run in found.values() for name in run["mean"]))
    for name in metrics or ():
        if name not in known:
            raise InputError(f"--metrics: expected of {', '.join(known)}, got {name}")
    columns = [*keys, "parameters", "epochs", "s a fold", *(metrics or known)]
    rows = [
        [*_values(Run.open(path).config, keys), *_numbers(run, metrics or known)]
        for path, run in found.items()
    ]
    return [_line(columns), _line(["---"] * len(columns)), *map(_line, rows)]


def _values(config: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """What a run's configuration has for the swept keys."""
    values = []
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) and part in value else None
        values.append(str(value["name"] if isinstance(value, dict) else value))
    return values


def _numbers(run: dict[str, Any], metrics: Sequence[str]) -> list[str]:
    folds, spread = run["folds"], run["sd_over_folds"]
    counts = [sum(fold[key] for fold in folds) / len(folds) for key in COUNTED]
    scores = [
        f"{run['mean'][name]:.4g}" + (f" ± {spread[name]:.2g}" if spread else "")
        if name in run["mean"]
        else ""
        for name in metrics
    ]
    return [f"{run['parameters']:,}", *(f"{count:.0f}" for count in counts), *scores]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
