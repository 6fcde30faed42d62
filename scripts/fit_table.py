"""Print a sweep or search of fits as a Markdown table, a row for each finished run.

    python scripts/fit_table.py SWEEP [--metrics error cross_entropy]

Numbers are means over folds on the test set ± standard deviation over *folds*, which
share most of their examples; they are not a spread over seeds.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from markdown_tables import markdown_table

from marl_pool.runs.sweep import Sweep, proposal_name, trial_name
from marl_pool.training.supervised.results import read_study
from marl_pool.utils.errors import InputError

COUNTED = ("epochs", "seconds")
"""Columns with the mean over folds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("--metrics", nargs="+", help="columns; default: all metrics")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(table(options.sweep, options.metrics)))
    except InputError as error:
        print(f"fit_table: {error}", file=sys.stderr)
        return 2
    return 0


def table(sweep: Path, metrics: Sequence[str] | None) -> list[str]:
    """Return the lines of the table.

    Raises:
        InputError: no sweep, no finished run, or a metric that the runs don't have.
    """
    opened = Sweep.open(sweep)
    keys = list(opened.space or opened.grid)
    if opened.space:
        trials = {
            proposal_name(number): tuple(str(proposal.values[key]) for key in keys)
            for number, proposal in enumerate(opened.proposals())
        }
    else:
        trials = {
            trial_name(dict(zip(keys, values, strict=True))): tuple(map(str, values))
            for values in product(*opened.grid.values())
        }
    by_values = {
        trials[path.name]: run
        for path, run in read_study(sweep).items()
        if path.name in trials
    }
    if not by_values:
        raise InputError(f"{sweep}: expected finished trials, found none")
    names = list(
        dict.fromkeys(name for run in by_values.values() for name in run["mean"])
    )
    for name in metrics or ():
        if name not in names:
            raise InputError(f"--metrics: expected of {', '.join(names)}, got {name}")
    columns = [*keys, "parameters", "epochs", "s a fold", *(metrics or names)]
    rows = [
        [*values, *_numbers(run, metrics or names)] for values, run in by_values.items()
    ]
    return markdown_table(columns, rows).splitlines()


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


if __name__ == "__main__":
    sys.exit(main())
