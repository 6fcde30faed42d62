"""Tabulate and draw runs of `fit task=clustering` or `task=mixture`.

    python scripts/clustering_study.py SWEEP --out FILE.png

SWEEP is the folder of a sweep, or of runs. The table has a row for each run, with the
published number of its encoder. The picture is Figure 2 of the SWARM paper: parameters
against loss, with a dashed frontier for each encoder and a dotted line at the loss of
the true mixtures.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_tables import markdown_table
from study_arguments import reported, study_parser

from marl_pool.files.figures import (
    INK,
    figure_style,
    new_figure,
    save_png,
    style_axes,
)
from marl_pool.training.supervised.results import read_study

TASKS = ("clustering", "mixture")
PUBLISHED = {
    ("clustering", "swarm", None): "0.416 ± 0.004 (192-10-1)",
    ("clustering", "set_transformer", None): "0.457 ± 0.015 (32-60-3)",
    ("clustering", "lstm_sorted", None): "0.582 ± 0.006 (64-3)",
    ("clustering", "lstm", None): "0.617 ± 0.008 (128-3)",
    ("clustering", "set_linear", None): "0.642 ± 0.002 (64-6)",
    ("clustering", "set_linear_max", None): "0.793 ± 0.007 (96-6)",
    ("mixture", "swarm", "avg"): "1.4986 ± 0.0053 (768-20-1, causal)",
    ("mixture", "swarm", "pma"): "1.5131 ± 0.0034 (512-10-1, causal)",
    ("mixture", "set_transformer", "avg"): "1.6349 ± 0.0429 (ISAB 64)",
    ("mixture", "set_transformer", "pma"): "1.4963 ± 0.0064 (ISAB 32)",
}
"""The best of each family in Tables 2 and 3, at the paper's sizes; in Table 3 the
log-likelihood has the other sign."""


def family(results: dict[str, Any]) -> str:
    """Return the name of the encoder and its variant."""
    encoder = results["encoder"]
    if encoder.get("sort"):
        return "lstm_sorted"
    if encoder.get("others") == "max":
        return "set_linear_max"
    return str(encoder["name"])


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Format a row for each run."""
    measure = "accuracy" if "accuracy" in runs[0]["mean"] else None
    head = ["encoder", "pooling", "width", "parameters", "loss ± sd over folds"]
    head += [*([measure] if measure else []), "true mixture", "published", "scale"]
    return markdown_table(head, (_row(results, measure) for results in runs))


def _row(results: dict[str, Any], measure: str | None) -> list[str]:
    mean, spread = results["mean"], results["sd_over_folds"]
    pooling = results["pooling"]["name"]
    key = (
        results["task"]["name"],
        family(results),
        None if pooling == "none" else pooling,
    )
    sd = f" ± {spread['loss']:.4f}" if spread else ""
    return [
        family(results),
        pooling,
        str(results["encoder"]["dim"]),
        f"{results['parameters']:,}",
        f"{mean['loss']:.4f}{sd}",
        *([f"{mean[measure]:.3f}"] if measure else []),
        f"{results['baselines']['true mixture']:.4f}",
        PUBLISHED.get(key, "–"),
        results["scale"],
    ]


@figure_style()
def draw(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Plot the loss against the number of parameters."""
    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    groups: dict[str, list[dict[str, Any]]] = {}
    for results in runs:
        pooling = results["pooling"]["name"]
        name = family(results) + ("" if pooling == "none" else f", {pooling}")
        groups.setdefault(name, []).append(results)
    for number, (name, group) in enumerate(groups.items()):
        _frontier(axes, group, f"C{number}", name)
    for value in {results["baselines"]["true mixture"] for results in runs}:
        axes.axhline(value, color=INK, linestyle=":", linewidth=1, label="true mixture")
    axes.set(xscale="log", xlabel="parameters", ylabel="loss on the test set")
    style_axes(axes)
    axes.legend(frameon=False)
    save_png(figure, out, 130)


def _frontier(axes: Any, runs: list[dict[str, Any]], color: str, name: str) -> None:
    """Plot runs with their spread, and the line through the best of each size."""
    ordered = sorted(runs, key=lambda results: results["parameters"])
    sizes = [results["parameters"] for results in ordered]
    losses = [results["mean"]["loss"] for results in ordered]
    spreads = [
        (results["sd_over_folds"] or {"loss": 0.0})["loss"] for results in ordered
    ]
    axes.errorbar(sizes, losses, spreads, fmt="o", color=color, capsize=3, label=name)
    best = [
        (size, loss)
        for place, (size, loss) in enumerate(zip(sizes, losses, strict=True))
        if loss <= min(losses[: place + 1])
    ]
    axes.plot(*zip(*best, strict=True), color=color, linestyle="--", linewidth=1)


def main() -> None:
    """Read the runs, print a table and draw the picture."""
    parser = study_parser(__doc__, needs_picture=True)
    arguments = parser.parse_args()
    with reported(parser):
        by_path = read_study(arguments.sweep, TASKS)
    runs = sorted(by_path.values(), key=lambda results: float(results["mean"]["loss"]))
    print(markdown(runs))
    draw(runs, arguments.out)


if __name__ == "__main__":
    main()
