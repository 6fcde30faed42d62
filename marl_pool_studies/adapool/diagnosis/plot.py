"""Figure of diagnoses: excess loss, ranges of relation scores, weights and bounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from marl_pool.files import figures
from marl_pool.utils.text import printable
from marl_pool_studies.adapool.diagnosis.records import Diagnosis, Named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGNAL, NOISE, MEAN = figures.BLUE, figures.VERMILION, figures.FAINT
SHIFT = 0.17
"""Distance of the signal's marks above, and the noise's below, the middle of a row."""
THICKNESS = 0.26


@figures.figure_style()
def plot_diagnoses(entries: Named, path: Path, title: str) -> None:
    """Draw a row for each diagnosis, in one panel or three.

    The first panel shows the excess signal loss with its 95 % interval over episodes,
    beside the loss of average pooling. The others need relation scores: the ranges of
    the scores, as in the paper's Figure 3, and the distances of the weights from the
    optimal ones with the bounds of Theorem 3.12.
    """
    panels = [_draw_excess]
    if any(row.checked for _, row in entries):
        panels += [_draw_scores, _draw_weights]
    longest = max(len(name) for name, _ in entries)
    width = 0.9 + 0.08 * longest + 3.6 * len(panels)
    figure = figures.new_figure(width, 1.7 + 0.32 * len(entries))
    cells = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, draw in zip(cells, panels, strict=True):
        draw(axes, [row for _, row in entries])
        axes.axvline(0, color=figures.INK, linewidth=0.8)
        axes.use_sticky_edges = False  # margins beside the bars
        axes.autoscale_view()
        figures.style_axes(axes, grid="x")
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False
        )
    figures.label_rows(cells[0], [name for name, _ in entries])
    figure.suptitle(printable(title))
    figures.save_png(figure, path)


def _draw_excess(axes: "Axes", rows: Sequence[Diagnosis]) -> None:
    # Mark the rows without numbers.
    places = [place for place, row in enumerate(rows) if not row.missing]
    for place in set(range(len(rows))) - set(places):
        figures.mark_missing_row(axes, place)
    measured = [rows[place] for place in places]
    mean, excess, low, high = _columns(
        measured, "mean_excess", "excess", "excess_low", "excess_high"
    )
    # Draw the mean of all tokens, then the head with its interval.
    bar: dict[str, Any] = {"color": MEAN, "markersize": 11, "markeredgewidth": 2}
    axes.plot(mean, places, "|", label="mean of all tokens", **bar)
    # If all resamples agree, rounding may put a bound beyond the mean.
    error = np.maximum(0, [excess - low, high - excess])
    dot: dict[str, Any] = {"fmt": "o", "color": SIGNAL, "capsize": 3}
    axes.errorbar(excess, places, xerr=error, label="pooling head, 95 %", **dot)
    axes.set_xlabel("excess signal loss / variance")


def _draw_scores(axes: "Axes", rows: Sequence[Diagnosis]) -> None:
    # The softmax is invariant to a shift: the largest noise score is set to 0.
    places = np.arange(len(rows))
    margin, signal, noise = _columns(rows, "margin", "signal_width", "noise_width")
    # Without noise there is no margin, and the signal starts at 0.
    low = np.nan_to_num(margin)
    axes.barh(places - SHIFT, signal, THICKNESS, low, color=SIGNAL, label="signal")
    axes.barh(places + SHIFT, noise, THICKNESS, -noise, color=NOISE, label="noise")
    axes.set_xlabel("relation score - largest noise score")


def _draw_weights(axes: "Axes", rows: Sequence[Diagnosis]) -> None:
    places = np.arange(len(rows))
    for shift, kind, color in ((-SHIFT, "signal", SIGNAL), (SHIFT, "noise", NOISE)):
        names = (f"{kind}_low", f"{kind}_error", f"{kind}_high")
        low, error, high = _columns(rows, *names)
        width, label = high - low, f"{kind}: L to U"
        axes.barh(
            places + shift, width, THICKNESS, low, color=color, alpha=0.35, label=label
        )
        axes.plot(error, places + shift, "o", color=color, markersize=4)
    axes.set_xlabel("optimal - actual weight of a token (dots)")


def _columns(rows: Sequence[Diagnosis], *names: str) -> list[np.ndarray]:
    return [np.array([getattr(row, name) for row in rows]) for name in names]
