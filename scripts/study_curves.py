"""Draw a sweep's learning curves and print its final returns.

    python scripts/study_curves.py SWEEP --facet env.counts --out FILE.png

There is a panel for each value of `--facet` and a line for each value of `--line`, by
default the pooling head: the mean over the seeds in bins of env steps, with a band for
its 95 % t interval and thin lines for the seeds. The printed table has the mean of the
last tenth of each trial's rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markdown_tables import half_interval, markdown_table
from study_arguments import reported, study_parser

from marl_pool.files.figures import figure_style, new_figure, save_png, style_axes
from marl_pool.runs.sweep import read_table

BINS = 50


def final_returns(
    table: pd.DataFrame, keys: Sequence[str], metric: str
) -> pd.DataFrame:
    """Compute the mean of the last tenth of each trial's rows."""

    def last(rows: pd.DataFrame) -> float:
        steps = rows["env_steps"]
        return float(rows.loc[steps > 0.9 * steps.max(), metric].mean())

    trials = table.groupby([*keys, "trial"], sort=False)
    return trials.apply(last, include_groups=False).rename("final").reset_index()


def markdown(final: pd.DataFrame, facet: str, line: str) -> str:
    """Format a row for each cell: each seed, their mean and its interval."""
    rows = []
    for (panel, name), cell in final.groupby([facet, line], sort=False):
        values = cell["final"].to_numpy()
        half, mean = half_interval(values), values.mean()
        seeds = ", ".join(f"{value:.3g}" for value in values)
        between = "" if np.isnan(half) else f"{mean - half:.3g} to {mean + half:.3g}"
        rows.append([panel, name, seeds, f"{mean:.3g}", between])
    head = [facet, line, "each seed", "mean", "95 % t interval"]
    return markdown_table(head, rows)


@figure_style()
def draw(table: pd.DataFrame, facet: str, line: str, metric: str, out: Path) -> None:
    """Plot a panel for each facet."""
    panels, names = table[facet].unique(), table[line].unique()
    figure = new_figure(5 * len(panels), 4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            cell = table[(table[facet] == panel) & (table[line] == name)]
            if len(cell):
                _line(axis, cell, metric, f"C{number}", str(name))
        axis.set(title=f"{facet} = {panel}", xlabel="env steps")
        axis.margins(x=0.01)
        style_axes(axis)
    # A band of few seeds can be many times as wide as the range of the returns.
    low, high = table[metric].min(), table[metric].max()
    axes[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes[0].set_ylabel(f"{metric}, training episodes")
    axes[-1].legend(title=line)
    save_png(figure, out, 120)


def _line(axis: Any, cell: pd.DataFrame, metric: str, color: str, name: str) -> None:
    edges = np.linspace(0, cell["env_steps"].max(), BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    place = np.clip(np.digitize(cell["env_steps"], edges) - 1, 0, BINS - 1)
    binned = cell.assign(bin=place).pivot_table(
        index="bin", columns="trial", values=metric
    )
    x = middle[binned.index]
    for trial in binned:
        axis.plot(x, binned[trial], color=color, lw=0.6, alpha=0.4)
    mean = binned.mean(axis=1)
    seeds = (row[~np.isnan(row)] for row in binned.to_numpy())
    half = np.array([*map(half_interval, seeds)])
    axis.plot(x, mean, color=color, lw=2, label=f"{name} (n = {binned.shape[1]})")
    axis.fill_between(x, mean - half, mean + half, color=color, alpha=0.15, lw=0)


def main() -> None:
    """Read a sweep's table, print a table and draw the picture."""
    parser = study_parser(__doc__, needs_picture=True)
    parser.add_argument("--facet", required=True, help="swept key of the panels")
    parser.add_argument("--line", default="pooling", help="swept key of the lines")
    parser.add_argument("--metric", default="return_mean")
    arguments = parser.parse_args()
    # A key without a value, null, is a value of its facet or line.
    with reported(parser):
        rows = read_table(arguments.sweep)
    for row in rows:
        row |= {key: "null" for key, value in row.items() if value is None}
    table = pd.DataFrame(rows)
    for key in (arguments.facet, arguments.line, arguments.metric):
        if key not in table:
            parser.error(f"{key}: no such column; choose from {', '.join(table)}")
    keys = (arguments.facet, arguments.line)
    print(markdown(final_returns(table, keys, arguments.metric), *keys))
    draw(table, *keys, arguments.metric, arguments.out)


if __name__ == "__main__":
    main()
