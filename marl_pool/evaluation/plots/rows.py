"""A picture of an evaluation of many different rows, the published ones beside them."""

import math
from collections.abc import Sequence
from pathlib import Path

from marl_pool.evaluation.plots.robustness import BASELINES, bounds
from marl_pool.evaluation.results import CLEAN, ONLY, TRAINED, Result
from marl_pool.utils.plotting import (
    BLUE,
    VERMILION,
    figure_style,
    label_rows,
    legend_below,
    mark_missing_row,
    new_figure,
    save_png,
    style_axes,
)
from marl_pool.utils.text import printable

OURS, PAPER = BLUE, VERMILION


@figure_style()
def plot_rows(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw a line for each row: mean, its 95 % interval, and the published mean.

    Rows of sampled actions, and of groups that did not learn, are in the table alone.

    Args:
        results: of `evaluate`.
        path: of the PNG.
        title: above all.
    """
    shown = [r for r in results if not (r.fixed or r.stochastic)]
    groups = list(dict.fromkeys(result.group for result in shown))
    rows = {
        group: [r for r in shown if r.group == group and r.policy == TRAINED]
        for group in groups
    }
    most = max(len(own) for own in rows.values())
    figure = new_figure(3.0 + 5.0 * len(groups), 1.3 + 0.26 * most)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        own = rows[group]
        for place, row in enumerate(own):
            if row.gap:
                mark_missing_row(axes, place)
        measured = [(place, row) for place, row in enumerate(own) if not row.gap]
        axes.errorbar(
            [row.mean for _, row in measured],
            [place for place, _ in measured],
            xerr=[
                [row.mean - bounds(row)[0] for _, row in measured],
                [bounds(row)[1] - row.mean for _, row in measured],
            ],
            fmt="o",
            color=OURS,
            capsize=3,
            label=f"mean, 95 % over episodes ({ONLY})",
        )
        paper = [(p, row) for p, row in measured if not math.isnan(row.published)]
        if paper:
            axes.plot(
                [row.published for _, row in paper],
                [place for place, _ in paper],
                "|",
                color=PAPER,
                markersize=13,
                markeredgewidth=2.5,
                label="published",
            )
        for base in shown:
            own_world = base.group == group and base.label == CLEAN
            if own_world and base.policy in BASELINES:
                axes.axvline(
                    base.mean,
                    color=BASELINES[base.policy],
                    linestyle="--",
                    linewidth=1.2,
                    label=f"{base.policy}, clean",
                )
        label_rows(axes, [_name(row) for row in own])
        style_axes(axes, grid="x")
        prefix = f"{group}: " if len(groups) > 1 else ""
        axes.set_xlabel(f"{prefix}return")
    handles, names = panels[0].get_legend_handles_labels()
    legend_below(figure, handles, names, columns=len(names))
    figure.suptitle(printable(title))
    save_png(figure, path)


def _name(row: Result) -> str:
    if row.perturbed:
        return f"{row.label} {row.severity:g}"
    return CLEAN if row.label == CLEAN else row.label
