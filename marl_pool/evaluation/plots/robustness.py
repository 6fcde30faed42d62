"""Plot of return against severity."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.results import CLEAN, ONLY, TRAINED, Result
from marl_pool.utils.plotting import (
    BLUE,
    GREEN,
    GRID,
    INK,
    PURPLE,
    VERMILION,
    figure_style,
    legend_below,
    new_figure,
    save_png,
    style_axes,
)
from marl_pool.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
COLORS = {False: BLUE, True: VERMILION}
"""Colors of the trained policy, deterministic and sampled."""
BASELINES = {"random": PURPLE, "heuristic": GREEN}


@figure_style()
def plot_robustness(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw return against severity, a panel for each perturbation.

    Bands are 95 % bootstrap intervals of the mean over episodes; horizontal lines are
    clean returns of the trained policy, the random one and the heuristic. A panel shows
    the reason of missing values. Groups are stacked from top to bottom.

    Args:
        results: rows of an evaluation.
        path: of the PNG.
        title: of the figure.
    """
    # Find the panels: perturbations of each group that was trained.
    results = [result for result in results if not result.fixed]
    groups = list(dict.fromkeys(result.group for result in results))
    labels = [r.label for r in results if r.perturbation != CLEAN] or [CLEAN]
    labels = list(dict.fromkeys(labels))
    columns = min(COLUMNS, len(labels))
    rows = math.ceil(len(labels) / columns)
    # Lay them out in a grid, one block of rows for each group.
    height = 2.5 * rows * len(groups) + 1.1
    figure = new_figure(3.0 * columns + 0.6, height)
    panels = figure.subplots(rows * len(groups), columns, squeeze=False)
    legend: dict[str, Any] = {}
    for place, group in enumerate(groups):
        own = [result for result in results if result.group == group]
        cells = list(panels[place * rows : (place + 1) * rows].flatten())
        used, unused = cells[: len(labels)], cells[len(labels) :]
        for axes, name in zip(used, labels, strict=True):
            _panel(axes, own, name)
            handles, names = axes.get_legend_handles_labels()
            legend |= dict(zip(names, handles, strict=True))
        # Hide the cells left over in the last row.
        for axes in unused:
            axes.set_axis_off()
        _set_common_range(used, own)
        prefix = f"{group}: " if len(groups) > 1 else ""
        # Only the first column has labels on its ordinate.
        for column, axes in enumerate(used):
            if column % columns == 0:
                axes.set_ylabel(f"{prefix}mean return")
            else:
                axes.tick_params(labelleft=False)
    legend_below(figure, legend.values(), legend, columns=len(legend))
    figure.suptitle(f"{printable(title)}; bands: 95 % over episodes, {ONLY}")
    save_png(figure, path)


def _panel(axes: "Axes", results: Sequence[Result], label: str) -> None:
    axes.set_title("\n".join(textwrap.wrap(label, 34)), fontsize=10)
    # Mark the severities that were measured, with clean episodes at 0.
    measured = {r.severity for r in results if r.label in (CLEAN, label)}
    axes.set_xlim(0, max(measured) or 1)
    axes.set_xticks(sorted(measured), [f"{place:g}" for place in sorted(measured)])
    axes.set_xlabel("severity")
    style_axes(axes)
    # Draw the baselines as horizontal lines.
    for result in results:
        if result.policy != TRAINED:
            line: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}
            color, name = BASELINES.get(result.policy, INK), f"{result.policy}, clean"
            axes.axhline(result.mean, color=color, label=name, **line)
    # Draw the curves of deterministic and of sampled actions.
    shown = [r for r in results if r.policy == TRAINED and r.label in (CLEAN, label)]
    for stochastic, color in COLORS.items():
        curve = [r for r in shown if r.stochastic == stochastic and not r.missing]
        if curve:
            _curve(axes, sorted(curve, key=lambda result: result.severity), color)
    # State the reason for a missing measurement in the panel.
    reasons = [r.missing for r in results if r.label == label and r.missing]
    if reasons:
        text = "\n".join(textwrap.wrap(f"not measured: {reasons[0]}", 30))
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
        style["bbox"] = {"facecolor": "white", "edgecolor": GRID}
        axes.text(0.5, 0.5, text, transform=axes.transAxes, **style)


def _curve(axes: "Axes", curve: Sequence[Result], color: str) -> None:
    severities = [result.severity for result in curve]
    low, high = zip(*map(bounds, curve), strict=True)
    name = curve[0].policy_label
    clean: dict[str, Any] = {
        "linestyle": ":",
        "linewidth": 1,
        "label": f"{name}, clean",
    }
    # Draw the clean return as a dotted line, then the interval and the curve.
    axes.axhline(curve[0].mean, color=color, **clean)
    axes.fill_between(severities, low, high, color=color, alpha=0.2, linewidth=0)
    means = [result.mean for result in curve]
    marks: dict[str, Any] = {"marker": "o", "markersize": 4, "clip_on": False}
    axes.plot(severities, means, color=color, label=name, **marks)


def bounds(result: Result) -> tuple[float, float]:
    """Return the interval of the mean; for a single episode the mean itself."""
    if math.isnan(result.mean_low):
        return result.mean, result.mean
    return result.mean_low, result.mean_high


def _set_common_range(cells: Sequence["Axes"], results: Sequence[Result]) -> None:
    """Set the range of all panels of a group to that of all their values."""
    seen = [result for result in results if not result.missing]
    low = min(bounds(result)[0] for result in seen)
    high = max(bounds(result)[1] for result in seen)
    margin = 0.06 * (high - low) or 0.1
    for axes in cells:
        axes.set_ylim(low - margin, high + margin)
