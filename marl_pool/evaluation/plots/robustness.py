"""Plot of return against severity."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marl_pool.evaluation.plots.panels import Curve, Panel, draw_panels
from marl_pool.evaluation.results import CLEAN, ONLY, TRAINED, Result
from marl_pool.utils import plotting
from marl_pool.utils.text import printable

BASELINES = {"random": plotting.PURPLE, "heuristic": plotting.GREEN}


@plotting.figure_style()
def plot_robustness(results: Sequence[Result], path: Path, title: str) -> None:
    """Draw return against severity, a panel for each perturbation and trained group.

    Bands are 95 % bootstrap intervals of the mean over episodes; horizontal lines are
    clean returns of the random policy and of the heuristic. A panel shows the reason of
    missing values.
    """
    shown = [result for result in results if not result.fixed]
    groups = list(dict.fromkeys(result.group for result in shown))
    labels = [r.label for r in shown if r.perturbation != CLEAN] or [CLEAN]
    panels = [
        _panel([r for r in shown if r.group == group], label, len(groups) > 1)
        for group in groups
        for label in dict.fromkeys(labels)
    ]
    names = [curve.name for panel in panels for curve in panel.curves]
    # Several groups have returns, and baselines, of their own.
    baselines = [r for r in shown if r.policy != TRAINED and len(groups) == 1]
    figure = draw_panels(
        panels,
        plotting.line_styles(list(dict.fromkeys(names))),
        xlabel="severity",
        ylabel="mean return",
        columns=4,
        lines={f"{row.policy}, clean": row.mean for row in baselines},
    )
    figure.suptitle(f"{printable(title)}; bands: 95 % over episodes, {ONLY}")
    plotting.save_png(figure, path)


def _panel(results: Sequence[Result], label: str, with_group: bool) -> Panel:
    rows = [r for r in results if r.policy == TRAINED and r.label in (CLEAN, label)]
    # Curves of deterministic and of sampled actions begin at the clean episodes.
    curves = []
    for stochastic in (False, True):
        own = [r for r in rows if r.stochastic == stochastic and not r.missing]
        if len(own) > 1 or (own and label == CLEAN):
            own.sort(key=lambda row: row.severity)
            severities = np.array([row.severity for row in own])
            means = np.array([row.mean for row in own])
            band = np.array([bounds(row) for row in own]).T
            curves.append(Curve(own[0].policy_label, severities, means, band))
    reasons = [row.missing for row in rows if row.missing]
    note = f"not measured: {reasons[0]}" if reasons else ""
    return Panel(f"{rows[0].group}: {label}" if with_group else label, curves, note)


def bounds(result: Result) -> tuple[float, float]:
    """Return the interval of the mean; for a single episode the mean itself."""
    if math.isnan(result.mean_low):
        return result.mean, result.mean
    return result.mean_low, result.mean_high
