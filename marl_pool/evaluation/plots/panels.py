"""Panels of curves, in one figure: the plot of an evaluation, and those of a report."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from marl_pool.utils import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.6
"""Inches: a report's column at 100 pixels an inch."""


@dataclass(frozen=True)
class Curve:
    """A line of a panel.

    Attributes:
        name: of the method.
        x: ``(n,)``.
        y: ``(n,)``.
        band: ``(2, n)``, its lower and upper bounds.
        points: ``(seeds, n)``, drawn as thin lines or as dots.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    band: np.ndarray = field(default_factory=lambda: np.empty((2, 0)))
    points: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))


class Panel(NamedTuple):
    """One pair of axes; ``note`` is the reason why a method has no line in it."""

    title: str
    curves: Sequence[Curve]
    note: str = ""


def draw_panels(
    panels: Sequence[Panel],
    styles: Mapping[str, plotting.LineStyle],
    *,
    xlabel: str,
    ylabel: str,
    columns: int,
    height: float = 2.35,
    dots: bool = True,
    lines: Mapping[str, float] = MappingProxyType({}),
) -> "Figure":
    """Draw panels that share the range of their ordinates, inside `figure_style`.

    Args:
        panels: at least one.
        styles: by method's name.
        xlabel: below each column.
        ylabel: beside each row.
        columns: maximal number of panels side by side.
        height: of a panel, inches.
        dots: draw single seeds as dots; otherwise as thin lines.
        lines: horizontal lines by name.
    """
    from matplotlib.lines import Line2D

    # Arrange the panels in a grid, and hide the cells left over.
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = plotting.new_figure(WIDTH, height * rows + 0.5)
    cells = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in cells[len(panels) :]:
        axes.set_axis_off()
    low, high = _range(panels, lines)
    # Only the first column and the last row have labels of their axes.
    for place, (axes, panel) in enumerate(zip(cells, panels, strict=False)):
        first = place % columns == 0
        plotting.style_axes(axes)
        axes.xaxis.set_major_formatter(plotting.short_number)
        title = "\n".join(textwrap.wrap(panel.title, 108 // columns))
        axes.set_title(title, fontsize=9.5)
        axes.set_ylim(low, high)
        # Draw the curves, the panel's note and the reference lines.
        for curve in panel.curves:
            _draw_curve(axes, curve, styles[curve.name], dots=dots)
        text: dict[str, Any] = {"color": plotting.FAINT, "va": "bottom", "ha": "left"}
        if panel.note:
            note = "\n".join(textwrap.wrap(panel.note, 30))
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            where: dict[str, Any] = {"transform": axes.transAxes, "bbox": box}
            axes.text(0.03, 0.04, note, fontsize=8, **where, **text)
        for name, level in lines.items():
            dashed: dict[str, Any] = {"linestyle": "--", "linewidth": 0.9}
            axes.axhline(level, color=plotting.FAINT, zorder=1, **dashed)
            text |= {"xycoords": ("axes fraction", "data"), "fontsize": 7.5}
            axes.annotate(name if first else "", (0.01, level), **text)
        axes.set_xlabel(xlabel if place + columns >= len(panels) else "")
        axes.set_ylabel(ylabel if first else "")
    # All panels share one legend.
    names = list(dict.fromkeys(c.name for panel in panels for c in panel.curves))
    handles = [Line2D([], [], **styles[name]._asdict()) for name in names]
    plotting.legend_below(figure, handles, names)
    return figure


def _draw_curve(
    axes: "Axes", curve: Curve, style: plotting.LineStyle, *, dots: bool
) -> None:
    # The band lies below the curves.
    line: dict[str, Any] = {"color": style.color}
    if not np.isnan(curve.band).all():
        band: dict[str, Any] = {"color": style.color, "alpha": 0.14, "linewidth": 0}
        axes.fill_between(curve.x, *curve.band, **band)
    # Seeds are thin lines, or dots.
    thin = {**line, "linewidth": 0.7, "alpha": 0.55}
    if dots:
        thin = {"linestyle": "", "marker": ".", "markersize": 4}
        thin |= {"color": style.color, "alpha": 0.7}
    for seed in curve.points:
        axes.plot(curve.x, seed, **thin)
    # The mean is a thick line with the method's marker.
    mean = {**line, "linewidth": 1.8}
    mean |= {"marker": style.marker, "markersize": 4.5} if dots else {}
    axes.plot(curve.x, curve.y, **mean)


def _range(panels: Sequence[Panel], lines: Mapping[str, float]) -> tuple[float, float]:
    """The range of everything drawn, with a margin."""
    drawn = [
        part.ravel()
        for panel in panels
        for curve in panel.curves
        for part in (curve.y, curve.band, curve.points)
    ]
    every = np.concatenate([np.array([*lines.values()]), *drawn])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = float(every.min()), float(every.max())
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin
