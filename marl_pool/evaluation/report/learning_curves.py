"""Learning curves: each seed, and the mean over seeds."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from marl_pool.evaluation.plots import Curve, Panel, draw_panels
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.methods import Method
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
) -> html.PageSection:
    """Build the section of learning curves, a panel for each training environment."""
    # Choose a measure of progress that all runs have logged.
    runs = [one for method in methods for one in method.runs]
    logged = [one.metrics.columns for one in runs if len(one.metrics)]
    counts = [key for key in COUNTS if all(key in columns for columns in logged)]
    count = counts[0] if counts else "iteration"

    # Progress and return of each run with two points or more.
    seeds: dict[str, np.ndarray] = {}
    reasons: dict[str, list[str]] = {}
    for one in runs:
        both = one.metrics.reindex(columns=[count, RETURN]).to_numpy().T
        both = both[:, np.isfinite(both).all(0)]
        if both.shape[1] > 1:
            seeds[one.name] = both
        else:
            reason = one.metrics_missing or f"no {RETURN} in metrics.csv"
            reasons.setdefault(reason, []).append(one.name)

    # Make a panel for each training environment, with the mean over seeds.
    panels = []
    for env in dict.fromkeys(method.env for method in methods):
        own = {
            method.kind: [seeds[one.name] for one in method.runs if one.name in seeds]
            for method in methods
            if method.env == env
        }
        curves = [_mean(kind, known) for kind, known in own.items() if known]
        panels.append(Panel(f"trained in {env}" if env else "", curves))
    # Add the figure, and the reasons for missing curves.
    section = html.PageSection("learning")
    if seeds:
        draw = partial(draw_panels, panels, styles, columns=2, height=3.4, dots=False)
        draw = partial(draw, xlabel=COUNTS[count], ylabel="mean return")
        files = [
            one.relative(one.run.metrics_path) for one in runs if one.name in seeds
        ]
        caption = "Each point is the mean over a short interval of training."
        section.components.append(html.figure(draw, caption, "; ".join(files)))
    section.components += [
        html.missing_note(f"{html.listed(names)}: {reason}.")
        for reason, names in reasons.items()
    ]
    return section


def _mean(kind: str, seeds: Sequence[np.ndarray]) -> Curve:
    """The seeds on one grid, up to the end of the shortest, and their mean."""
    start, end = max(seed[0, 0] for seed in seeds), min(seed[0, -1] for seed in seeds)
    grid = np.linspace(start, end, min(POINTS, max(len(seed[0]) for seed in seeds)))
    lines = []
    for seed in seeds:
        # Average it over at most `POINTS` intervals.
        chunks = np.array_split(seed, min(POINTS, seed.shape[1]), axis=1)
        smooth = np.stack([chunk.mean(1) for chunk in chunks], 1)
        lines.append(np.interp(grid, *smooth))
    return Curve(kind, grid, np.mean(lines, 0), points=np.stack(lines))
