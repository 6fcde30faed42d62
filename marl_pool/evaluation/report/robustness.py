"""What perturbations cost: profiles over severity, areas, other worlds."""

import importlib.util
import math
from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.comparison import INTERVAL_FROM
from marl_pool.evaluation.report.components import (
    Cell,
    Figure,
    Heading,
    Note,
    Section,
    Table,
    gap,
    number,
    shade,
    span,
)
from marl_pool.evaluation.report.learning_curves import NO_PLOTS
from marl_pool.evaluation.report.plots import Curve, Look, Panel, draw_panels
from marl_pool.evaluation.report.provenance import origin
from marl_pool.evaluation.report.study import (
    AS_IS,
    NOT_ASKED,
    Condition,
    Measured,
    Study,
)
from marl_pool.evaluation.results import ONLY

LEVELS = {"scripted policy": 1.0, "random policy": 0.0}
SHADES = "White is 0 or less, blue is 1 or more."
"""What heat maps of scores look like."""


def profiles(study: Study, looks: Mapping[str, Look], suffix: str) -> Section:
    """Build the section with score over severity, a panel for each perturbation."""
    section = Section(
        f"profiles{suffix}",
        "Robustness profiles",
        "What is left of the score as a perturbation grows. Dots are single seeds; "
        "lines are their means. " + _bands(study),
    )
    ladders = [label for label in study.labels("area") if any(study.severities(label))]
    if not ladders:
        section.blocks.append(Note("No perturbation was measured.", gap=True))
        return section
    if importlib.util.find_spec("matplotlib") is None:
        section.blocks.append(Note(NO_PLOTS, gap=True))
        return section
    for world in study.worlds:
        own = study.of_world(world)
        if world:
            section.blocks.append(Heading(f"Trained and tested in {world}"))
        panels = [_panel(study, own, label) for label in ladders]
        svg = draw_panels(
            panels,
            looks,
            xlabel="severity",
            ylabel=study.unit,
            # Rows as equal as can be, of four panels at most.
            columns=math.ceil(len(panels) / math.ceil(len(panels) / 4)),
            lines=LEVELS if study.unit == "score" else None,
        )
        caption = f"{study.unit.capitalize()} against severity; 0 is unperturbed."
        section.blocks.append(Figure(svg, caption, origin(own)))
    return section


def _bands(study: Study) -> str:
    fewest = min(own.scores.seeds for own in study.measured)
    if fewest < INTERVAL_FROM:
        return (
            "Bands of a method with one seed are 95 % bootstrap intervals over "
            "episodes: they hold for this policy only, not for the method."
        )
    return (
        "Bands are 95 % bootstrap intervals: seeds are resampled first, the episodes "
        "in them second."
    )


def _panel(study: Study, measured: Sequence[Measured], label: str) -> Panel:
    rungs = [AS_IS]
    rungs += [Condition("rung", label, s) for s in study.severities(label) if s]
    curves, missing = [], {}
    for own in measured:
        there = [rung for rung in rungs if own.has(rung)]
        if len(there) > 1:
            curves.append(_curve(own, there))
        lost = [own.gaps[rung] for rung in rungs if rung in own.gaps]
        if lost:
            missing[own.method.kind] = lost[0]
    words = "; ".join(f"{name} not measured: {why}" for name, why in missing.items())
    return Panel(label, curves, words)


def _curve(own: Measured, rungs: Sequence[Condition]) -> Curve:
    value, low, high = np.array([own.mean(rung) for rung in rungs]).T
    points = own.under(rungs).points
    severities = np.array([rung.severity for rung in rungs])
    return Curve(own.method.kind, severities, value, low, high, points)


def areas(study: Study, suffix: str) -> Section:
    """Build the heat map of areas: perturbations by methods."""
    section = Section(
        f"areas{suffix}",
        "One number for each perturbation",
        "The mean score on the way from unperturbed to the highest severity tested "
        "(the area under the profile, divided by its length): 1 is as good as the "
        f"scripted policy unperturbed, 0 as the random one. {SHADES} Where two "
        "evaluations tested other severities, each set has a row of its own.",
    )
    if study.unit != "score":
        section.blocks.append(Note(_no_scores(), gap=True))
        return section
    conditions = [AS_IS, *study.areas]
    head = ["perturbation", *(own.method.name for own in study.measured)]
    lines = [
        [
            Cell("unperturbed" if one == AS_IS else study.named(one)),
            *(measured_cell(study, own, one) for own in study.measured),
        ]
        for one in conditions
    ]
    section.blocks.append(Table(head, lines))
    return section


def _no_scores() -> str:
    return (
        "Returns of different worlds have no common scale, and shares of negative "
        "returns mean nothing. Scores need a random policy, a scripted one that is "
        "better, and a single group that learns, which are not given here."
    )


def measured_cell(study: Study, own: Measured, one: Condition) -> Cell:
    """The cell of a heat map: a method under a condition, with its interval.

    Returns have no shade: those of different worlds have no common scale.
    """
    if not own.has(one):
        return gap(own.gaps.get(one, NOT_ASKED))
    interval, points = own.mean(one), own.points(one)
    seeds = ", ".join(map(number, points))
    title = f"{study.named(one)}; {origin([own])}; each seed: {seeds}"
    note = f" {ONLY}" if len(points) < INTERVAL_FROM else ""
    small = f"{span(interval)}{note}" if span(interval) else "no interval"
    tone = shade(interval.value) if study.unit == "score" else None
    return Cell(number(interval.value), title, tone, small=small)
