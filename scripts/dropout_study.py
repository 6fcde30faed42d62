"""Table and pictures of the study of dropout in the learner: docs/data/dropout.csv.

    python scripts/dropout_study.py collect RUNS --out docs/data/dropout.csv
    python scripts/dropout_study.py table docs/data/dropout.csv --out dropout.png
    python scripts/dropout_study.py curves docs/data/dropout.csv --out curves.png

`collect` reads the configurations of the runs in a folder, and their metrics as means
over ten iterations. `table` prints, for each cell, the final return of each seed, their
mean and interquartile mean with bootstrap intervals, and the probability that a run of
the cell returns more than one of AdaPool, if there are any; then the differences in
return and entropy between AdaPool and each other head, by dropout. Final values are
means over the last tenth of the recorded iterations; the picture has one dot for each.
`curves` draws all recorded values. A dropout is a rate and, after it, what differs from
the paper's recipe.
"""

from argparse import ArgumentParser
from functools import cache, reduce
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml
from markdown_tables import markdown_table
from study_arguments import new_file, read_rows, reported

from marl_pool.config.compose import compose
from marl_pool.evaluation.statistics.intervals import (
    bootstrap,
    interquartile_mean,
    probability_of_improvement,
)
from marl_pool.files.figures import (
    FAINT,
    INK,
    figure_style,
    legend_below,
    line_styles,
    new_figure,
    save_png,
    short_number,
    style_axes,
)
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEYS = ["counts", "dropout", "pooling"]
RUN = [*KEYS, "seed"]
RETURN, ENTROPY = "return_mean", "agent/entropy"
METRICS = [RETURN, ENTROPY, "agent/first_kl"]
LABELS = ["mean return", "entropy, nats", "KL before the first step, nats"]
RECIPES = {
    "simple_centroid": ["ppo=paper", "experiment=simple_centroid"],
    "boxworld": ["ppo=paper_boxworld", "experiment=boxworld"],
}
"""Environment → arguments of the paper's recipe."""
CHANGES = {
    "ppo.lr_schedule": "falling rate",
    "ppo.dropout_in_sampler": "sampler too",
    "policy.init_std": "{key} {value}",
    "encoder.attention_scale": "{key} {value}",
    "ppo.batch_size": "{key} {value}",
    "ppo.gamma": "{key} {value}",
    "ppo.gae_lambda": "{key} {value}",
    "ppo.normalize_value_loss": "{key}",
}
"""Key → name of a run that has another value than the recipe."""
EVERY = 10
"""Iterations whose metrics are averaged into one row."""
REFERENCE = "ada"
RANDOM, SCRIPTED = "random actions", "script"
REFERENCE_RETURNS = {
    "1-3-28": {RANDOM: -1.90, SCRIPTED: -0.23},
    "1-31-0": {RANDOM: -1.82, SCRIPTED: -0.18},
    "1-15-16": {RANDOM: -1.82, SCRIPTED: -0.19},
    "1-1-30": {RANDOM: -2.08, SCRIPTED: -0.31},
}
"""Returns of 2048 episodes, by counts; standard errors of 0.01 and 0.002."""
INITIAL, LARGEST = "first iteration", "largest possible"
REFERENCE_ENTROPIES = {INITIAL: 7.1, LARGEST: 12.1}
"""Entropies that help to read the others; the policy bounds the standard deviation."""


def collect(runs: Path) -> pd.DataFrame:
    """Return the metrics of all runs in a folder, averaged over `EVERY` iterations."""
    frames = []
    for file in sorted(runs.glob("*/metrics.csv")):
        config_file = file.with_name("config.yaml")
        if not config_file.is_file():
            raise InputError(f"{config_file}: no such file")
        config = yaml.safe_load(config_file.read_text("utf-8"))
        metrics = read_rows(file, ["iteration", "env_steps", *METRICS])
        if metrics["env_steps"].iloc[-1] < config["total_steps"]:
            continue  # unfinished
        blocks = metrics.groupby((metrics["iteration"] - 1) // EVERY)
        frame = blocks[METRICS].mean().assign(env_steps=blocks["env_steps"].max())
        env = config["env"]
        frame["counts"] = env.get("counts", env["name"])
        frame["dropout"] = f"{config['ppo']['dropout']:g}{changes(config)}"
        frames.append(
            frame.assign(pooling=config["pooling"]["name"], seed=config["seed"])
        )
    if not frames:
        raise InputError(f"{runs}: expected finished runs, got none")
    table = pd.concat(frames)[[*RUN, "env_steps", *METRICS]]
    repeated = table[table.duplicated([*RUN, "env_steps"])]
    if len(repeated):
        cell = ", ".join(map(str, repeated.iloc[0][RUN]))
        raise InputError(f"{runs}: expected one run of a kind, got several of {cell}")
    return table


def changes(config: dict[str, Any]) -> str:
    """Name what a configuration changes in the paper's recipe, after commas."""
    recipe, names = recipe_of(config["env"]["name"]), []
    for path, name in CHANGES.items():
        section, key = path.split(".")
        value = recipe[section][key]
        actual = config[section].get(key, value)  # older runs lack newer keys
        if actual != value:
            names.append(f", {name.format(key=key, value=actual)}")
    return "".join(names)


@cache
def recipe_of(env: str) -> dict[str, Any]:
    """Compose the paper's recipe for an environment."""
    if env not in RECIPES:
        raise InputError(f"expected runs of {', '.join(RECIPES)}, got one of {env}")
    return compose("train", RECIPES[env])


def final_values(table: pd.DataFrame, metric: str = RETURN) -> pd.Series:
    """Return the final mean of a metric in each run, by cell and seed."""
    last_steps = table.groupby(RUN)["env_steps"].transform("max")
    last = table[table["env_steps"] > 0.9 * last_steps]
    return last.groupby(RUN)[metric].mean()


def markdown(table: pd.DataFrame) -> str:
    """Format a row for each cell."""
    finals, rows = final_values(table), []
    for cell, values in finals.groupby(level=KEYS):
        counts, dropout, head = cell
        returns = values.to_numpy()
        opponents = finals.xs((counts, dropout), level=KEYS[:2]).get(REFERENCE)
        wins = ""
        if head != REFERENCE and opponents is not None:
            pair = (returns[:, None], opponents.to_numpy()[:, None])
            wins = f"{float(probability_of_improvement(*pair)):.2f}"
        estimates = [bootstrap(returns), bootstrap(returns, interquartile_mean)]
        rows.append(
            [
                counts,
                dropout,
                head,
                ", ".join(f"{value:.2f}" for value in returns),
                *(_interval(*estimate) for estimate in estimates),
                wins,
            ]
        )
    head = ["counts", "dropout", "head", "each seed", "mean", "IQM", "beats ada"]
    return markdown_table(head, rows)


def lead(finals: pd.Series) -> tuple[float, float]:
    """Compare AdaPool with one other head, over the levels, by permutation.

    Args:
        finals: final values of the two heads, by level, head and seed.

    Returns:
        AdaPool's lead, the mean over levels, and its two-sided p-value: the share of
        all exchanges of seeds between the heads, within levels, whose lead is as large.
    """
    observed, leads = 0.0, []
    for _, level in finals.groupby(level="counts"):
        is_reference = level.index.get_level_values("pooling") == REFERENCE
        returns, count = level.to_numpy(), int(is_reference.sum())
        sums = np.array([sum(subset) for subset in combinations(returns, count)])
        rest = (returns.sum() - sums) / (len(returns) - count)
        leads.append(sums / count - rest)
        observed += returns[is_reference].mean() - returns[~is_reference].mean()
    # Count the sums of one lead of each level that are as large. Ten seeds have 184,756
    # leads in a level: sort the last ones instead of forming all sums.
    *others, last = map(np.sort, leads)
    sums = reduce(np.add.outer, others, np.zeros(1)).ravel()
    # A bound of 0 counts every exchange once.
    bound = max(abs(observed) - 1e-9, 0)
    above = len(last) - np.searchsorted(last, bound - sums)
    below = np.searchsorted(last, -bound - sums, side="right" if bound else "left")
    p_value = (above + below).sum() / (len(sums) * len(last))
    return observed / len(leads), float(p_value)


def leads_text(table: pd.DataFrame, metric: str = RETURN) -> str:
    """Return a line for each dropout and head."""
    finals, lines = final_values(table, metric), []
    for dropout, values in finals.groupby(level="dropout"):
        heads = values.index.get_level_values("pooling")
        if REFERENCE not in heads:
            continue
        for head in sorted({*heads} - {REFERENCE}):
            pair = values[heads.isin([REFERENCE, head])].droplevel("dropout")
            difference, p_value = lead(pair)
            lines.append(
                f"{metric}, dropout {dropout}: {REFERENCE} - {head} = "
                f"{difference:.2f}, p = {p_value:.3f}"
            )
    return "\n".join(lines)


def _interval(value: float, low: float, high: float) -> str:
    between = "" if low != low else f" ({low:.2f} to {high:.2f})"
    return f"{value:.2f}{between}"


@figure_style()
def draw_finals(table: pd.DataFrame, out: Path) -> None:
    """Plot a dot for each run: a row for each metric, a column for each level."""
    levels = dict(iter(table.groupby("counts", sort=False)))
    styles = line_styles(list(dict.fromkeys(table["pooling"])))
    widths = [cell["dropout"].nunique() for cell in levels.values()]
    figure = new_figure(2 + 1.5 * sum(widths), 6)
    grid = figure.subplots(
        2, len(levels), sharey="row", sharex="col", squeeze=False, width_ratios=widths
    )
    for column, (counts, cell) in zip(grid.T, levels.items(), strict=True):
        column[0].set_title(level_name(counts))
        for axes, metric in zip(column, METRICS, strict=False):
            for place, (head, values) in places(cell, metric).items():
                color = styles[head].color
                dots = {"s": 22, "alpha": 0.6, "linewidths": 0, "label": head}
                axes.scatter([place] * len(values), values, color=color, **dots)
                ends = (place - 0.08, place + 0.08)
                axes.hlines(values.median(), *ends, color=color, linewidth=2)
            style_axes(axes, "y")
        mark(column[0], REFERENCE_RETURNS.get(counts, {}), "left")
        mark(column[1], REFERENCE_ENTROPIES, "left")
        names = [name.replace(", ", ",\n") for name in cell["dropout"].unique()]
        column[1].set_xticks(range(len(names)), names)
        column[1].set_xlim(-0.6, len(names) - 0.4)
        column[1].set_xlabel("dropout")
    for axes, label in zip(grid[:, 0], LABELS, strict=False):
        axes.set_ylabel(f"{label}, last tenth")
    handles, heads = grid[0, 0].get_legend_handles_labels()
    by_head = dict(zip(heads, handles, strict=True))
    legend_below(figure, by_head.values(), by_head)
    save_png(figure, out, 130)


def places(cell: pd.DataFrame, metric: str) -> dict[float, tuple[str, pd.Series]]:
    """Return the final values of each head and dropout, by their place on the axis."""
    finals, by_place = final_values(cell, metric), {}
    for number, dropout in enumerate(cell["dropout"].unique()):
        group = finals.xs(dropout, level="dropout").groupby(level="pooling")
        for offset, (head, values) in enumerate(group):
            by_place[number + 0.2 * (offset - (len(group) - 1) / 2)] = (head, values)
    return by_place


def level_name(counts: str) -> str:
    """Return the numbers of tokens of a level, if it names any, as a title."""
    if "-" not in counts:
        return counts
    _, signal, noise = counts.split("-")
    return f"{signal} tokens of signal, {noise} of noise"


def mark(axes: "Axes", values: dict[str, float], side: str) -> None:
    """Draw a horizontal line at each value, with its name at the left or right end."""
    for name, value in values.items():
        axes.axhline(value, color=FAINT, linewidth=0.8, linestyle=":")
        place, units = (float(side == "right"), value), ("axes fraction", "data")
        style: dict[str, Any] = {"ha": side, "va": "bottom", "fontsize": 7.5}
        axes.annotate(name, place, xycoords=units, color=INK, **style)


@figure_style()
def draw_curves(table: pd.DataFrame, out: Path) -> None:
    """Plot curves: a row for each metric, a column for each level and dropout."""
    cells = list(table.groupby(KEYS[:2], sort=False))
    styles = line_styles(list(dict.fromkeys(table["pooling"])))
    figure = new_figure(3.2 * len(cells), 7.5)
    grid = figure.subplots(
        len(METRICS), len(cells), sharey="row", sharex=True, squeeze=False
    )
    for column, ((counts, dropout), cell) in zip(grid.T, cells, strict=True):
        column[0].set_title(f"{level_name(counts)},\ndropout {dropout}")
        for axes, metric in zip(column, METRICS, strict=True):
            for head, runs in cell.groupby("pooling", sort=False):
                curves = runs.pivot(index="env_steps", columns="seed", values=metric)
                color = styles[head].color
                axes.plot(curves, color=color, linewidth=0.7, alpha=0.4)
                axes.plot(curves.median(axis=1), color=color, linewidth=2, label=head)
            style_axes(axes)
            axes.xaxis.set_major_formatter(short_number)
        mark(column[0], REFERENCE_RETURNS.get(counts, {}), "right")
        column[-1].set_xlabel("env steps")
    for axes, label in zip(grid[:, 0], LABELS, strict=True):
        axes.set_ylabel(label)
    grid[-1, 0].set_yscale("symlog", linthresh=1e-3)
    grid[-1, 0].set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.yaxis.set_major_formatter(short_number)
    handles, names = grid[0, 0].get_legend_handles_labels()
    legend_below(figure, handles, names)
    save_png(figure, out, 110)


def main() -> None:
    """Collect runs, or tabulate and draw the collected metrics."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["collect", "table", "curves"])
    parser.add_argument("source", type=Path, help="folder of runs, or the CSV")
    parser.add_argument("--out", type=new_file, help="CSV or picture to write")
    parser.add_argument("--seeds", nargs="+", help="use only these")
    parser.add_argument(
        "--dropout", nargs="+", help="use only these: 0, '0.1, sampler too'"
    )
    arguments = parser.parse_args()
    with reported(parser):
        if arguments.action != "table" and arguments.out is None:
            raise InputError("--out: expected the file to write")
        if arguments.action == "collect":
            rows = collect(arguments.source)
            rows.round(4).to_csv(arguments.out, index=False)
            return
        columns = [*RUN, "env_steps", *METRICS]
        table = read_rows(arguments.source, columns, {"dropout": str})
        for key in ("seed", "dropout"):
            if names := getattr(arguments, key.replace("seed", "seeds")):
                table = table[table[key].astype(str).isin(names)]
                if table.empty:
                    raise InputError(f"--{key}: none of them is in {arguments.source}")
        if arguments.action == "curves":
            draw_curves(table, arguments.out)
            return
        print(markdown(table))
        print(leads_text(table), leads_text(table, ENTROPY), sep="\n")
        if arguments.out is not None:
            draw_finals(table, arguments.out)


if __name__ == "__main__":
    main()
