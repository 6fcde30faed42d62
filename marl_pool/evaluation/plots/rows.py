"""Plot of an evaluation with many different rows, such as other environments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl_pool.evaluation.plots.robustness import BASELINES, bounds
from marl_pool.evaluation.results import CLEAN, ONLY, TRAINED, Result
from marl_pool.utils import plotting
from marl_pool.utils.text import printable


@plotting.figure_style()
def plot_rows(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw mean and 95 % interval of each row.

    Rows of sampled actions, and of groups that were not trained, are left out.
    """
    # Select the trained policies' deterministic rows.
    shown = [r for r in results if not (r.fixed or r.stochastic)]
    groups = list(dict.fromkeys(result.group for result in shown))
    rows = {
        group: [r for r in shown if r.group == group and r.policy == TRAINED]
        for group in groups
    }
    most = max(len(own) for own in rows.values())
    # Make a column for each group, as high as its longest list of rows.
    figure = plotting.new_figure(3.0 + 5.0 * len(groups), 1.3 + 0.26 * most)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        own = rows[group]
        # Mark the rows without numbers.
        for place, row in enumerate(own):
            if row.missing:
                plotting.mark_missing_row(axes, place)
        # Draw the mean and interval of each measured row.
        measured = [place for place, row in enumerate(own) if not row.missing]
        means = np.array([own[place].mean for place in measured])
        ends = np.array([bounds(own[place]) for place in measured]).reshape(-1, 2).T
        name = f"mean, 95 % over episodes ({ONLY})"
        style: dict[str, Any] = {
            "fmt": "o",
            "color": plotting.BLUE,
            "capsize": 3,
            "label": name,
        }
        axes.errorbar(means, measured, xerr=np.abs(ends - means), **style)
        # Draw the clean baselines as vertical lines.
        for base in shown:
            clean = base.group == group and base.label == CLEAN
            if clean and base.policy in BASELINES:
                line: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}
                line["label"] = f"{base.policy}, clean"
                axes.axvline(base.mean, color=BASELINES[base.policy], **line)
        plotting.label_rows(axes, [_name(row) for row in own])
        plotting.style_axes(axes, grid="x")
        prefix = f"{group}: " if len(groups) > 1 else ""
        axes.set_xlabel(f"{prefix}return")
    handles, names = panels[0].get_legend_handles_labels()
    plotting.legend_below(figure, handles, names, columns=len(names))
    figure.suptitle(printable(title))
    plotting.save_png(figure, path)


def _name(row: Result) -> str:
    if row.perturbed:
        return f"{row.label} {row.severity:g}"
    return CLEAN if row.label == CLEAN else row.label
