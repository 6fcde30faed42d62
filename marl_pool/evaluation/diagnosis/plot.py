"""A picture of diagnoses: excess, neighborhoods of the scores, weights and bounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from marl_pool.evaluation.diagnosis.records import Diagnosis
from marl_pool.utils.plotting import GRID, INK, new_figure, save_png
from marl_pool.utils.text import literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGNAL, NOISE, MEAN = "#0b5fa5", "#e07b00", "#8a8a84"
SHIFT = 0.17
"""How far signal is above, and noise below, the middle of a row."""
THICKNESS = 0.26

Named = Sequence[tuple[str, Diagnosis]]


def plot_diagnoses(named: Named, path: Path, title: str) -> None:
    """Draw a line for each row, in one panel or three.

    The first shows the excess signal loss with its 95 % interval over episodes, and
    what the mean of all tokens would have. The others are of heads with relation
    scores: their neighborhoods, as in the paper's Figure 3, and how far weights are
    from the optimal ones, with the bounds of Theorem 3.12.

    Args:
        named: rows and what they are called.
        path: of the PNG.
        title: above all panels.
    """
    panels = [_excess]
    if any(row.checked for _, row in named):
        panels += [_neighborhoods, _weights]
    longest = max(len(name) for name, _ in named)
    width = 0.9 + 0.08 * longest + 3.6 * len(panels)
    figure = new_figure(width, 1.7 + 0.32 * len(named))
    cells = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, draw in zip(cells, panels, strict=True):
        draw(axes, [row for _, row in named])
        axes.use_sticky_edges = False  # room before the bars
        axes.autoscale_view()
        axes.grid(axis="x", color=GRID)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False
        )
    cells[0].set_yticks(range(len(named)), [literal(name) for name, _ in named])
    cells[0].set_ylim(len(named) - 0.5, -0.5)
    figure.suptitle(literal(title), color=INK)
    save_png(figure, path)


def _excess(axes: "Axes", rows: Sequence[Diagnosis]) -> None:
    for place, row in enumerate(rows):
        if row.gap:
            axes.annotate(
                "not measured",
                (0.02, place),
                xycoords=("axes fraction", "data"),
                va="center",
                color=MEAN,
                fontsize=8,
            )
    places = [place for place, row in enumerate(rows) if not row.gap]
    found = [rows[place] for place in places]
    axes.plot(
        [row.mean_excess for row in found],
        places,
        "|",
        color=MEAN,
        markersize=11,
        markeredgewidth=2,
        label="mean of all tokens",
    )
    axes.errorbar(
        [row.excess for row in found],
        places,
        xerr=_errors(found),
        fmt="o",
        color=SIGNAL,
        capsize=3,
        label="the head's, 95 %",
    )
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("excess signal loss / variance", color=INK)


def _errors(rows: Sequence[Diagnosis]) -> np.ndarray:
    """How far the interval reaches to both sides, ``(2, rows)``; NaN where is none."""
    excess, low, high = (
        np.array([getattr(row, name) for row in rows])
        for name in ("excess", "excess_low", "excess_high")
    )
    # Where all resamples agree, rounding may put a bound beyond the mean.
    return np.maximum(0, [excess - low, high - excess])


def _neighborhoods(axes: "Axes", rows: Sequence[Diagnosis]) -> None:
    """Scores relative to the largest of the noise, which the softmax leaves free."""
    places = np.arange(len(rows))
    margins = np.array([row.margin for row in rows])
    # Without noise there is nothing to be relative to.
    lowest = np.where(np.isnan(margins), 0.0, margins)
    for shift, start, width, color, name in (
        (-SHIFT, lowest, [row.signal_width for row in rows], SIGNAL, "signal"),
        (
            SHIFT,
            [-row.noise_width for row in rows],
            [row.noise_width for row in rows],
            NOISE,
            "noise",
        ),
    ):
        axes.barh(places + shift, width, THICKNESS, start, color=color, label=name)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("relation score - largest of the noise", color=INK)


def _weights(axes: "Axes", rows: Sequence[Diagnosis]) -> None:
    places = np.arange(len(rows))
    for shift, kind, color in ((-SHIFT, "signal", SIGNAL), (SHIFT, "noise", NOISE)):
        low, error, high = (
            np.array([getattr(row, f"{kind}_{part}") for row in rows])
            for part in ("low", "error", "high")
        )
        axes.barh(
            places + shift,
            high - low,
            THICKNESS,
            low,
            color=color,
            alpha=0.35,
            label=f"{kind}: L to U",
        )
        axes.plot(error, places + shift, "o", color=color, markersize=4)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("optimal - real weight of a token (dots)", color=INK)
