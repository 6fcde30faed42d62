"""How the runs learned: curves over training, each seed and their mean."""

import importlib.util
from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.report.components import Figure, Note, Section, listed
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.plots import Curve, Look, Panel, draw_panels
from marl_pool.evaluation.report.sources import Source

RETURN = "return_mean"
COUNTS = {
    "env_steps": "environment steps",
    "batches": "batches",
    "iteration": "iterations",
}
"""Columns that say how far training was, the one preferred first."""
POINTS = 120
"""Of a curve; a longer one is averaged over so many stretches."""
NO_PLOTS = 'no pictures: pip install "marl-pool[plots]"'


def learning(methods: Sequence[Method], looks: Mapping[str, Look]) -> Section:
    """Build the section of learning curves, a panel for each training world."""
    section = Section(
        "learning",
        "Learning curves",
        "Mean return of the training episodes, with sampled actions. Thick: the mean "
        "over seeds, as far as all of them came. Thin: each seed.",
    )
    count = _count(methods)
    sources = [source for method in methods for source in method.sources]
    bare = {
        source.name: source.metrics_gap or f"no {RETURN} in metrics.csv"
        for source in sources
        if _curve(source, count) is None
    }
    if len(bare) < len(sources):
        section.blocks.append(_figure(methods, looks, count))
    for reason in dict.fromkeys(bare.values()):
        names = listed([name for name, own in bare.items() if own == reason])
        section.blocks.append(Note(f"{names}: {reason}.", gap=True))
    return section


def _figure(
    methods: Sequence[Method], looks: Mapping[str, Look], count: str
) -> Figure | Note:
    if importlib.util.find_spec("matplotlib") is None:
        return Note(NO_PLOTS, gap=True)
    panels = []
    for world in dict.fromkeys(method.world for method in methods):
        own = [method for method in methods if method.world == world]
        curves = [_mean(method, count) for method in own]
        panels.append(Panel(f"trained in {world}" if world else "", _known(curves)))
    return Figure(
        draw_panels(
            panels,
            looks,
            xlabel=COUNTS[count],
            ylabel="mean return",
            columns=2,
            height=3.4,
            dots=False,
        ),
        "Each point is the mean over a short stretch of training.",
        "; ".join(
            source.where(source.run.metrics_path)
            for method in methods
            for source in method.sources
            if _curve(source, count) is not None
        ),
    )


def _known(curves: Sequence[Curve | None]) -> list[Curve]:
    return [curve for curve in curves if curve is not None]


def _count(methods: Sequence[Method]) -> str:
    """The first of `COUNTS` that every run with metrics has."""
    heads = [
        set(source.metrics[0])
        for method in methods
        for source in method.sources
        if source.metrics
    ]
    return next((c for c in COUNTS if all(c in head for head in heads)), "iteration")


def _curve(source: Source, count: str) -> np.ndarray | None:
    """``(2, n)``: how far training was, and the return then."""
    rows = [row for row in source.metrics if RETURN in row and count in row]
    both = np.array([(row[count], row[RETURN]) for row in rows]).reshape(-1, 2).T
    both = both[:, np.isfinite(both).all(0)]
    return both if both.shape[1] > 1 else None


def _mean(method: Method, count: str) -> Curve | None:
    """The seeds on one grid, up to where the shortest ends, and their mean."""
    known = [_curve(source, count) for source in method.sources]
    seeds = [seed for seed in known if seed is not None]
    if not seeds:
        return None
    start, end = max(seed[0, 0] for seed in seeds), min(seed[0, -1] for seed in seeds)
    grid = np.linspace(start, end, min(POINTS, max(len(seed[0]) for seed in seeds)))
    lines = np.stack([np.interp(grid, *_smooth(seed)) for seed in seeds])
    none = np.full(len(grid), np.nan)
    return Curve(method.kind, grid, lines.mean(0), none, none, lines)


def _smooth(seed: np.ndarray) -> np.ndarray:
    """Means over so many stretches as a picture can show."""
    pieces = np.array_split(seed, min(POINTS, seed.shape[1]), axis=1)
    return np.stack([piece.mean(1) for piece in pieces], 1)
