"""Figures of evaluations and reports."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from marl_pool.evaluation.results import CLEAN, ONLY, TRAINED, Result
from marl_pool.files import figures
from marl_pool.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.6
"""Width in inches: a report's column at 100 pixels per inch."""
BASELINES = {"random": figures.PURPLE, "heuristic": figures.GREEN}


@dataclass(frozen=True)
class Curve:
    """A line of a panel.

    Attributes:
        name: name of the method.
        x: ``(n,)``.
        y: ``(n,)``.
        band: ``(2, n)``, lower and upper bounds of ``y``.
        points: ``(seeds, n)``, drawn as thin lines or as dots.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    band: np.ndarray = field(default_factory=lambda: np.empty((2, 0)))
    points: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))


class Panel(NamedTuple):
    """One pair of axes; ``note`` says why a method has no curve in it."""

    title: str
    curves: Sequence[Curve]
    note: str = ""


def draw_panels(
    panels: Sequence[Panel],
    styles: Mapping[str, figures.LineStyle],
    *,
    xlabel: str,
    ylabel: str,
    columns: int,
    height: float = 2.35,
    dots: bool = True,
    lines: Mapping[str, float] = MappingProxyType({}),
) -> "Figure":
    """Draw panels that share a y range; to be called inside `figure_style`.

    There must be at least one panel. At most ``columns`` are side by side, each
    ``height`` inches high. ``styles`` are by method, and ``lines`` are the levels of
    horizontal lines by name. Single seeds are ``dots``, or else thin lines.
    """
    from matplotlib.lines import Line2D

    # Arrange the panels in a grid, and hide unused cells.
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = figures.new_figure(WIDTH, height * rows + 0.5)
    cells = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in cells[len(panels) :]:
        axes.set_axis_off()
    low, high = _range(panels, lines)
    # Only the first column and the last row have axis labels.
    for place, (axes, panel) in enumerate(zip(cells, panels, strict=False)):
        first = place % columns == 0
        figures.style_axes(axes)
        axes.xaxis.set_major_formatter(figures.short_number)
        title = "\n".join(textwrap.wrap(panel.title, 108 // columns))
        axes.set_title(title, fontsize=9.5)
        axes.set_ylim(low, high)
        # Draw the curves, the panel's note and the reference lines.
        for curve in panel.curves:
            _draw_curve(axes, curve, styles[curve.name], dots=dots)
        text: dict[str, Any] = {"color": figures.FAINT, "va": "bottom", "ha": "left"}
        if panel.note:
            note = "\n".join(textwrap.wrap(panel.note, 30))
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            where: dict[str, Any] = {"transform": axes.transAxes, "bbox": box}
            axes.text(0.03, 0.04, note, fontsize=8, **where, **text)
        for name, level in lines.items():
            dashed: dict[str, Any] = {"linestyle": "--", "linewidth": 0.9}
            axes.axhline(level, color=figures.FAINT, zorder=1, **dashed)
            text |= {"xycoords": ("axes fraction", "data"), "fontsize": 7.5}
            axes.annotate(name if first else "", (0.01, level), **text)
        axes.set_xlabel(xlabel if place + columns >= len(panels) else "")
        axes.set_ylabel(ylabel if first else "")
    # All panels share one legend.
    names = list(dict.fromkeys(c.name for panel in panels for c in panel.curves))
    handles = [Line2D([], [], **styles[name]._asdict()) for name in names]
    figures.legend_below(figure, handles, names)
    return figure


def _draw_curve(
    axes: "Axes", curve: Curve, style: figures.LineStyle, *, dots: bool
) -> None:
    color, marker = style
    if not np.isnan(curve.band).all():
        band: dict[str, Any] = {"color": color, "alpha": 0.14, "linewidth": 0}
        axes.fill_between(curve.x, *curve.band, **band)
    # Seeds are thin lines, or dots with the method's marker on their mean.
    thin: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.55}
    mean: dict[str, Any] = {"linewidth": 1.8}
    if dots:
        thin = {"linestyle": "", "marker": ".", "markersize": 4, "alpha": 0.7}
        mean |= {"marker": marker, "markersize": 4.5}
    for seed in curve.points:
        axes.plot(curve.x, seed, color=color, **thin)
    axes.plot(curve.x, curve.y, color=color, **mean)


def _range(panels: Sequence[Panel], lines: Mapping[str, float]) -> tuple[float, float]:
    """Return the y range of everything drawn, with a margin."""
    drawn = [
        values.ravel()
        for panel in panels
        for curve in panel.curves
        for values in (curve.y, curve.band, curve.points)
    ]
    finite = np.concatenate([np.array([*lines.values()]), *drawn])
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def draw_points(
    rows: Sequence[tuple[str, Sequence[float], float, float, float]],
    styles: Mapping[str, figures.LineStyle],
    xlabel: str,
) -> "Figure":
    """Draw a row for each method: every seed, their mean, and its interval.

    A row is a name, the value of each seed, their aggregate, and its bounds or NaN.
    """
    figure = figures.new_figure(WIDTH, 0.8 + 0.36 * len(rows))
    axes = figure.subplots()
    figures.style_axes(axes, grid="x")
    axes.xaxis.set_major_formatter(figures.short_number)
    # Draw the aggregate as a bar, seeds as symbols, and the interval as a shade.
    for y, (name, points, value, low, high) in enumerate(rows):
        color, marker = styles[name]
        if not math.isnan(low):
            axes.plot([low, high], [y, y], color=color, linewidth=5, alpha=0.3)
        axes.plot(value, y, "|", color=color, markersize=14, markeredgewidth=2.5)
        dots: dict[str, Any] = {"markersize": 6, "markeredgecolor": "white"}
        axes.plot(points, [y] * len(points), marker, color=color, **dots)
    figures.label_rows(axes, [row[0] for row in rows])
    axes.set_xlabel(xlabel)
    return figure


@figures.figure_style()
def plot_robustness(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw return against severity, a panel for each perturbation and trained group.

    Bands are 95 % bootstrap intervals of the mean over episodes; horizontal lines are
    clean returns of the random policy and of the heuristic. A panel states why values
    are missing.
    """
    trained_rows = [result for result in results if not result.fixed]
    groups = list(dict.fromkeys(result.group for result in trained_rows))
    labels = [r.label for r in trained_rows if r.perturbation != CLEAN] or [CLEAN]
    panels = [
        _panel([r for r in trained_rows if r.group == group], label, len(groups) > 1)
        for group in groups
        for label in dict.fromkeys(labels)
    ]
    names = [curve.name for panel in panels for curve in panel.curves]
    # Baselines differ between groups, but all panels share the lines.
    baselines = [r for r in trained_rows if r.policy != TRAINED and len(groups) == 1]
    # With the same baselines for sampled actions, those are named so.
    lines = {f"{row.policy_label}, clean": row.mean for row in baselines}
    figure = draw_panels(
        panels,
        figures.line_styles(list(dict.fromkeys(names))),
        xlabel="severity",
        ylabel="mean return",
        columns=4,
        lines=lines,
    )
    figure.suptitle(f"{printable(title)}; bands: 95 % over episodes, {ONLY}")
    figures.save_png(figure, path)


def _panel(results: Sequence[Result], label: str, with_group: bool) -> Panel:
    rows = [r for r in results if r.policy == TRAINED and r.label in (CLEAN, label)]
    # Curves of deterministic and of sampled actions begin at the clean episodes.
    curves = []
    for stochastic in (False, True):
        curve_rows = [r for r in rows if r.stochastic == stochastic and not r.missing]
        if len(curve_rows) > 1 or (curve_rows and label == CLEAN):
            curve_rows.sort(key=lambda row: row.severity)
            severities = np.array([row.severity for row in curve_rows])
            means = np.array([row.mean for row in curve_rows])
            band = np.array([_bounds(row) for row in curve_rows]).T
            curves.append(Curve(curve_rows[0].policy_label, severities, means, band))
    reasons = [row.missing for row in rows if row.missing]
    note = f"not measured: {reasons[0]}" if reasons else ""
    return Panel(f"{rows[0].group}: {label}" if with_group else label, curves, note)


def _bounds(result: Result) -> tuple[float, float]:
    """Return the interval of the mean; for a single episode the mean itself."""
    if math.isnan(result.mean_low):
        return result.mean, result.mean
    return result.mean_low, result.mean_high


@figures.figure_style()
def plot_rows(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw mean and 95 % interval of each row.

    Rows of sampled actions, and of groups that were not trained, are left out.
    """
    plotted_rows = [r for r in results if not (r.fixed or r.stochastic)]
    groups = list(dict.fromkeys(result.group for result in plotted_rows))
    rows = {
        group: [r for r in plotted_rows if r.group == group and r.policy == TRAINED]
        for group in groups
    }
    most = max(len(group_rows) for group_rows in rows.values())
    # Make a column for each group, as high as the longest list of rows.
    figure = figures.new_figure(3.0 + 5.0 * len(groups), 1.3 + 0.26 * most)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        # Draw the mean and interval of each measured row, and mark the others.
        group_rows, measured = rows[group], []
        for place, row in enumerate(group_rows):
            if row.missing:
                figures.mark_missing_row(axes, place)
            else:
                measured.append(place)
        means = np.array([group_rows[place].mean for place in measured])
        ends = (
            np.array([_bounds(group_rows[place]) for place in measured])
            .reshape(-1, 2)
            .T
        )
        style: dict[str, Any] = {"fmt": "o", "color": figures.BLUE, "capsize": 3}
        style["label"] = f"mean, 95 % over episodes ({ONLY})"
        axes.errorbar(means, measured, xerr=np.abs(ends - means), **style)
        # Draw the clean baselines as vertical lines.
        for base in plotted_rows:
            clean = base.group == group and base.label == CLEAN
            if clean and base.policy in BASELINES:
                line: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}
                line["label"] = f"{base.policy}, clean"
                axes.axvline(base.mean, color=BASELINES[base.policy], **line)
        names = [
            f"{row.label} {row.severity:g}" if row.perturbed else row.label
            for row in group_rows
        ]
        figures.label_rows(axes, names)
        figures.style_axes(axes, grid="x")
        prefix = f"{group}: " if len(groups) > 1 else ""
        axes.set_xlabel(f"{prefix}return")
    handles, labels = panels[0].get_legend_handles_labels()
    figures.legend_below(figure, handles, labels, columns=len(labels))
    figure.suptitle(printable(title))
    figures.save_png(figure, path)
