"""The report's pictures, as SVG that stands in the page itself."""

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.6
"""Inches: a page's column at 100 pixels an inch."""
INK, GRID, FAINT = "#333333", "#e4e4e0", "#8a8a84"
OKABE_ITO = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#444444"),
)
"""Colours that the colour-blind tell apart (Okabe and Ito, 2008), yellow left out."""
MARKERS = "osD^vPX*"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters, in the reader's own font
    "svg.hashsalt": "marl-pool",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,  # names of users may have dollars
    "text.color": INK,
    "axes.labelcolor": INK,
}


class Look(NamedTuple):
    """How a method is drawn everywhere on the page."""

    color: str
    marker: str


class Curve(NamedTuple):
    """A line of a panel.

    Attributes:
        name: of the method.
        x: ``(n,)``.
        y: ``(n,)``.
        low: ``(n,)`` of its band, NaN for none.
        high: ``(n,)``.
        points: ``(seeds, n)``, one for each seed; drawn thin, or as dots.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    points: np.ndarray


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        curves: its lines.
        gap: said in it, where a method has no line; empty where all have.
    """

    title: str
    curves: Sequence[Curve]
    gap: str = ""


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """A colour and a marker for each name; colours repeat after seven."""
    return {
        name: Look(OKABE_ITO[place % len(OKABE_ITO)], MARKERS[place % len(MARKERS)])
        for place, name in enumerate(names)
    }


def _styled(draw: Callable[..., str]) -> Callable[..., str]:
    """Draw in the report's style, whatever the user's own is."""

    @wraps(draw)
    def styled(*arguments: Any, **options: Any) -> str:
        import matplotlib as mpl

        with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "backend": "svg"}):
            return draw(*arguments, **options)

    return styled


@_styled
def draw_panels(
    panels: Sequence[Panel],
    looks: Mapping[str, Look],
    *,
    xlabel: str,
    ylabel: str,
    columns: int,
    height: float = 2.35,
    dots: bool = True,
    lines: Mapping[str, float] | None = None,
    steps: bool = False,
) -> str:
    """Draw panels that share the range of their ordinates.

    Args:
        panels: at least one.
        looks: by method's name.
        xlabel: below each column.
        ylabel: beside each row.
        columns: how many panels stand side by side, at most.
        height: of a panel, inches.
        dots: draw single seeds as dots; otherwise as thin lines.
        lines: horizontal lines by name, drawn where they lie within the range.
        steps: curves that jump, as a distribution does.

    Returns:
        The SVG.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = _figure(WIDTH, height * rows + 0.5)
    cells = figure.subplots(rows, columns, squeeze=False, sharey=True)
    low, high = _range(panels)
    for place, axes in enumerate(cells.flatten()):
        if place >= len(panels):
            axes.set_axis_off()
            continue
        _dress(axes)
        title = textwrap.wrap(panels[place].title, 108 // columns)
        axes.set_title("\n".join(title), fontsize=9.5)
        axes.set_ylim(low, high)
        _draw_panel(axes, panels[place], looks, dots=dots, steps=steps)
        for name, level in (lines or {}).items():
            if low < level < high:
                _level(axes, level, name if place % columns == 0 else "")
        axes.set_xlabel(xlabel if place + columns >= len(panels) else "")
        axes.set_ylabel(ylabel if place % columns == 0 else "")
    _legend(figure, panels, looks)
    return _svg(figure)


@_styled
def draw_points(
    rows: Sequence[tuple[str, Sequence[float], float, float, float]],
    looks: Mapping[str, Look],
    xlabel: str,
) -> str:
    """Draw a row for each method: every seed, their mean, and its interval.

    Args:
        rows: name, each seed's number, their aggregate, and its bounds or NaN.
        looks: by method's name.
        xlabel: what the numbers are.
    """
    figure = _figure(WIDTH, 0.8 + 0.36 * len(rows))
    axes = figure.subplots()
    _dress(axes)
    for place, (name, points, value, low, high) in enumerate(rows):
        color, marker = looks[name]
        if not math.isnan(low):
            axes.plot([low, high], [place, place], color=color, linewidth=5, alpha=0.3)
        axes.plot(value, place, "|", color=color, markersize=14, markeredgewidth=2.5)
        axes.plot(
            points,
            [place] * len(points),
            marker,
            color=color,
            markersize=6,
            markeredgecolor="white",
        )
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)
    return _svg(figure)


def _draw_panel(
    axes: "Axes", panel: Panel, looks: Mapping[str, Look], *, dots: bool, steps: bool
) -> None:
    for curve in panel.curves:
        color, marker = looks[curve.name]
        style: dict[str, Any] = {"drawstyle": "steps-post"} if steps else {}
        if not np.isnan(curve.low).all():
            axes.fill_between(
                curve.x,
                curve.low,
                curve.high,
                color=color,
                alpha=0.14,
                linewidth=0,
                step="post" if steps else None,
            )
        for seed in curve.points:
            kind: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.55, **style}
            if dots:
                kind = {"linestyle": "", "marker": ".", "markersize": 4, "alpha": 0.7}
            axes.plot(curve.x, seed, color=color, **kind)
        mean = {**style, "linewidth": 1.8}
        mean |= {"marker": marker, "markersize": 4.5} if dots else {}
        axes.plot(curve.x, curve.y, color=color, **mean)
    if panel.gap:
        text = "\n".join(textwrap.wrap(panel.gap, 30))
        axes.text(
            *(0.03, 0.04, text),
            transform=axes.transAxes,
            color=FAINT,
            fontsize=8,
            va="bottom",
        )


def _level(axes: "Axes", level: float, name: str) -> None:
    axes.axhline(level, color=FAINT, linestyle="--", linewidth=0.9, zorder=1)
    axes.annotate(
        name,
        (0.01, level),
        xycoords=("axes fraction", "data"),
        ha="left",
        va="bottom",
        fontsize=7.5,
        color=FAINT,
    )


def _range(panels: Sequence[Panel]) -> tuple[float, float]:
    """From the lowest to the highest that is drawn, with a margin."""
    drawn = [
        part.ravel()
        for panel in panels
        for curve in panel.curves
        for part in (curve.y, curve.low, curve.high, curve.points)
    ]
    every = np.concatenate(drawn) if drawn else np.array([0.0, 1.0])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = float(every.min()), float(every.max())
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _dress(axes: "Axes") -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8.5, color=FAINT)
    axes.xaxis.set_major_formatter(_ticks)


def _ticks(value: float, _: float) -> str:
    """``0.5``, ``50k`` or ``2M``."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:.3g}"


def _legend(
    figure: "Figure", panels: Sequence[Panel], looks: Mapping[str, Look]
) -> None:
    from matplotlib.lines import Line2D

    names = dict.fromkeys(curve.name for panel in panels for curve in panel.curves)
    lines = [
        Line2D([], [], color=looks[name].color, marker=looks[name].marker)
        for name in names
    ]
    figure.legend(
        lines,
        list(names),
        loc="outside lower center",
        ncols=min(len(names), 6) or 1,
        frameon=False,
    )


def _svg(figure: "Figure") -> str:
    """The figure alone: no prologue, no metadata, no ids that another could have."""
    with io.StringIO() as out:
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
        text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Only what is referred to needs an id; matplotlib's others repeat in each figure.
    text = re.sub(r' id="[a-zA-Z0-9]+_[0-9]+"', "", text)
    return text.replace(" xmlns:xlink=", " role='img' xmlns:xlink=", 1)
