"""Tabulate and draw a sweep of the hierarchical tasks.

    python scripts/merging_study.py SWEEP [--out FILE.png]

A row for each policy, with what else of task and fit the sweep varies; mean ± standard
deviation over seeds of every test metric. The picture is that of Figure 4, left, of the
hierarchical transformers' paper: the error of each run, in groups.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from marl_pool.runs import Run
from marl_pool.training.supervised.results import read_study
from marl_pool.utils.errors import InputError
from marl_pool.utils.tables import markdown_table

TASKS = ("reconstruction", "merged_classification")
AgentGroup = dict[str, list[float]]


def grouped(found: dict[Path, dict[str, Any]]) -> dict[str, AgentGroup]:
    """Test metrics of the seeds, by what tells runs apart beside them."""
    options = [_options(Run.open(path).config) for path in found]
    varied = [
        key
        for key in dict.fromkeys(key for each in options for key in each)
        if key != "policy"
        and any(each.get(key) != options[0].get(key) for each in options)
    ]
    groups: dict[str, AgentGroup] = {}
    for trial, own in zip(found.values(), options, strict=True):
        label = ", ".join([own["policy"], *(f"{key}={own.get(key)}" for key in varied)])
        for name, value in trial["mean"].items():
            groups.setdefault(label, {}).setdefault(name, []).append(value)
    return groups


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """What a run's numbers may depend on, but for its seed."""
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


def draw(groups: dict[str, AgentGroup], metric: str, title: str, out: Path) -> None:
    """Write the picture: each run's error, and the mean of each group."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1.2 + 0.4 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, group in enumerate(groups.values()):
        values = group[metric]
        axes.plot(values, [place] * len(values), "o", color="#0b5fa5", alpha=0.6)
        axes.plot([mean(values)], [place], "|", color="#333333", markersize=18)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set(xlabel=f"test {metric}")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(out, dpi=120)


def main() -> None:
    """Read a sweep's runs, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of a sweep")
    parser.add_argument("--out", type=Path, help="picture to write")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    try:
        found = read_study(arguments.sweep, TASKS)
        groups = grouped(found)
    except InputError as error:
        parser.error(str(error))
    print(markdown(groups))
    if arguments.out is not None:
        first = next(iter(found.values()))
        title = f"{first['task']['dataset']}, scale {first['scale']}"
        draw(groups, first["metric"], title, arguments.out)


if __name__ == "__main__":
    main()
