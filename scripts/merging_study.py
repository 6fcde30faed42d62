"""Tabulate and draw a sweep of the hierarchical tasks.

    python scripts/merging_study.py SWEEP [--out FILE.png]

The table has a row for each policy and each other option of task and fit that the sweep
varies, with the mean ± standard deviation over seeds of every test metric. The picture
is Figure 4, left, of the hierarchical transformers' paper: each run's error, in groups.
"""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from markdown_tables import markdown_table
from study_arguments import reported, study_parser

from marl_pool.files.figures import (
    INK,
    figure_style,
    label_rows,
    new_figure,
    save_png,
    style_axes,
)
from marl_pool.runs.run import Run
from marl_pool.training.supervised.results import read_study

TASKS = ("reconstruction", "merged_classification")
AgentGroup = dict[str, list[float]]


def grouped(runs: dict[Path, dict[str, Any]]) -> dict[str, AgentGroup]:
    """Group the test metrics of runs that differ in their seed only."""
    options = [_options(Run.open(path).config) for path in runs]
    varied = [
        key
        for key in dict.fromkeys(key for choices in options for key in choices)
        if key != "policy"
        and any(choices.get(key) != options[0].get(key) for choices in options)
    ]
    groups: dict[str, AgentGroup] = {}
    for trial, choices in zip(runs.values(), options, strict=True):
        label = ", ".join(
            [choices["policy"], *(f"{key}={choices.get(key)}" for key in varied)]
        )
        for name, value in trial["mean"].items():
            groups.setdefault(label, {}).setdefault(name, []).append(value)
    return groups


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a run's numbers depend on, except its seed."""
    fit = {f"fit.{key}": value for key, value in config["fit"].items()}
    return {**config["task"], **fit, "scale": config["scale"]}


def markdown(groups: dict[str, AgentGroup]) -> str:
    """Format the table of a document."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    rows = (
        [label, *(_cell(group.get(name, [])) for name in names)]
        for label, group in groups.items()
    )
    return markdown_table(["", *names], rows)


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{mean(values):.4f} ± {stdev(values):.4f}"


@figure_style()
def draw(groups: dict[str, AgentGroup], metric: str, title: str, out: Path) -> None:
    """Plot each run's error, and the mean of each group."""
    figure = new_figure(6, 1.2 + 0.4 * len(groups))
    axes = figure.subplots()
    for place, group in enumerate(groups.values()):
        values = group[metric]
        axes.plot(values, [place] * len(values), "o", color="#0b5fa5", alpha=0.6)
        axes.plot([mean(values)], [place], "|", color=INK, markersize=18)
    label_rows(axes, list(groups))
    axes.set(xlabel=f"test {metric}")
    axes.set_title(title, fontsize=10)
    style_axes(axes, "x")
    save_png(figure, out, 120)


def main() -> None:
    """Read a sweep's runs, print a table and draw the picture."""
    parser = study_parser(__doc__)
    arguments = parser.parse_args()
    with reported(parser):
        runs = read_study(arguments.sweep, TASKS)
    groups = grouped(runs)
    print(markdown(groups))
    if arguments.out is not None:
        first = next(iter(runs.values()))
        title = f"{first['task']['dataset']}, scale {first['scale']}"
        draw(groups, first["metric"], title, arguments.out)


if __name__ == "__main__":
    main()
