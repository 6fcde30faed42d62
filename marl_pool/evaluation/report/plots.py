"""The figures of the report, as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from marl_pool.evaluation.plots.panels import WIDTH, Panel, draw_panels
from marl_pool.utils import plotting


@plotting.figure_style()
def panels_svg(
    panels: Sequence[Panel], styles: Mapping[str, plotting.LineStyle], **options: Any
) -> str:
    """Draw panels; see `draw_panels`."""
    return plotting.to_svg(draw_panels(panels, styles, **options))


def draw_points(
    rows: Sequence[tuple[str, Sequence[float], float, float, float]],
    styles: Mapping[str, plotting.LineStyle],
    xlabel: str,
) -> str:
    """Draw a row for each method: every seed, their mean, and its interval.

    Args:
        rows: name, the number of each seed, their aggregate, and its bounds or NaN.
        styles: by method's name.
        xlabel: name of the numbers.
    """
    with plotting.figure_style():
        figure = plotting.new_figure(WIDTH, 0.8 + 0.36 * len(rows))
        axes = figure.subplots()
        plotting.style_axes(axes, grid="x")
        axes.xaxis.set_major_formatter(plotting.short_number)
        # Mean as a bar, seeds as symbols, and the interval as a shade.
        for y, (name, points, value, low, high) in enumerate(rows):
            color, marker = styles[name]
            if not math.isnan(low):
                axes.plot([low, high], [y, y], color=color, linewidth=5, alpha=0.3)
            axes.plot(value, y, "|", color=color, markersize=14, markeredgewidth=2.5)
            dots: dict[str, Any] = {"markersize": 6, "markeredgecolor": "white"}
            axes.plot(points, [y] * len(points), marker, color=color, **dots)
        plotting.label_rows(axes, [row[0] for row in rows])
        axes.set_xlabel(xlabel)
        return plotting.to_svg(figure)
