"""Learning curves: each seed, and the mean over seeds."""

from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.report.components import (
    Note,
    PageSection,
    figure,
    listed,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.plots import Curve, Panel, draw_panels
from marl_pool.evaluation.report.runs import ReportedRun
from marl_pool.utils.plotting import LineStyle

RETURN = "return_mean"
COUNTS = {
    "env_steps": "environment steps",
    "batches": "batches",
    "iteration": "iterations",
}
"""Columns of the progress of training, in order of preference."""
POINTS = 120
"""Maximal length of a curve; longer ones are averaged over as many intervals."""


def learning_curves(
    methods: Sequence[Method], styles: Mapping[str, LineStyle]
) -> PageSection:
    """Build the section of learning curves, a panel for each training environment."""
    runs = [one for method in methods for one in method.runs]
    logged = [one.metrics.columns for one in runs if len(one.metrics)]
    counts = [key for key in COUNTS if all(key in columns for columns in logged)]
    count = counts[0] if counts else "iteration"
    reasons: dict[str, list[str]] = {}
    files = []
    for one in runs:
        if _curve(one, count) is None:
            reason = one.metrics_missing or f"no {RETURN} in metrics.csv"
            reasons.setdefault(reason, []).append(one.name)
        else:
            files.append(one.relative(one.run.metrics_path))
    section = PageSection("learning")
    if files:
        picture = figure(
            lambda: _draw(methods, styles, count),
            "Each point is the mean over a short interval of training.",
            "; ".join(files),
        )
        section.components.append(picture)
    section.components += [
        Note(f"{listed(names)}: {reason}.", missing=True)
        for reason, names in reasons.items()
    ]
    return section


def _draw(
    methods: Sequence[Method], styles: Mapping[str, LineStyle], count: str
) -> str:
    panels = []
    for env in dict.fromkeys(method.env for method in methods):
        curves = [_mean(one, count) for one in methods if one.env == env]
        known = [curve for curve in curves if curve is not None]
        panels.append(Panel(f"trained in {env}" if env else "", known))
    return draw_panels(
        panels,
        styles,
        xlabel=COUNTS[count],
        ylabel="mean return",
        columns=2,
        height=3.4,
        dots=False,
    )


def _curve(one: ReportedRun, count: str) -> np.ndarray | None:
    """``(2, n)``: progress and return; None for fewer than two points."""
    both = one.metrics.reindex(columns=[count, RETURN]).to_numpy().T
    both = both[:, np.isfinite(both).all(0)]
    return both if both.shape[1] > 1 else None


def _mean(method: Method, count: str) -> Curve | None:
    """The seeds on one grid, up to the end of the shortest, and their mean."""
    curves = (_curve(one, count) for one in method.runs)
    seeds = [curve for curve in curves if curve is not None]
    if not seeds:
        return None
    start, end = max(seed[0, 0] for seed in seeds), min(seed[0, -1] for seed in seeds)
    grid = np.linspace(start, end, min(POINTS, max(len(seed[0]) for seed in seeds)))
    lines = np.stack([np.interp(grid, *_smooth(seed)) for seed in seeds])
    none = np.full(len(grid), np.nan)
    return Curve(method.kind, grid, lines.mean(0), none, none, lines)


def _smooth(seed: np.ndarray) -> np.ndarray:
    """Average a curve over at most `POINTS` intervals."""
    chunks = np.array_split(seed, min(POINTS, seed.shape[1]), axis=1)
    return np.stack([chunk.mean(1) for chunk in chunks], 1)
