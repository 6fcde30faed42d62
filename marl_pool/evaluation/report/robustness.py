"""What perturbations cost: profiles over severity, areas, other worlds."""

import importlib.util
import math
from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.comparison import INTERVAL_FROM
from marl_pool.evaluation.report.blocks import (
    Block,
    Cell,
    Figure,
    Heading,
    Note,
    Section,
    Table,
    gap,
    number,
    shaded,
    span,
)
from marl_pool.evaluation.report.learning import NO_PLOTS
from marl_pool.evaluation.report.plots import Curve, Look, Panel, draw_panels
from marl_pool.evaluation.report.study import AS_IS, Condition, Measured, Study

OCCLUDE = "occlude"
LEVELS = {"scripted policy": 1.0, "random policy": 0.0}


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
        "scripted policy unperturbed, 0 as the random one. Blue is high.",
    )
    labels = [Condition("area", label) for label in study.labels("area")]
    if study.unit != "score":
        section.blocks.append(Note(_no_scores(), gap=True))
        return section
    rows = [("unperturbed", AS_IS), *((one.label, one) for one in labels)]
    section.blocks.append(heat_map(study.measured, rows, "perturbation"))
    return section


def _no_scores() -> str:
    return (
        "Returns of different worlds have no common scale, and shares of negative "
        "returns mean nothing. Scores need a random policy, a scripted one that is "
        "better, and a single group that learns, which are not given here."
    )


def heat_map(
    measured: Sequence[Measured], rows: Sequence[tuple[str, Condition]], corner: str
) -> Table:
    """A table of conditions by methods, shaded, each cell with its interval."""
    values = [
        own.mean(one).value if own.has(one) else math.nan
        for _, one in rows
        for own in measured
    ]
    tones = iter(shaded(values, low=min(0.0, *values, 0.0), high=1.0))
    cells = []
    for name, one in rows:
        line = [Cell(name)]
        for own in measured:
            line.append(_cell(own, one, next(tones)))
        cells.append(line)
    return Table([corner, *(own.method.name for own in measured)], cells)


def _cell(own: Measured, one: Condition, tone: float | None) -> Cell:
    if not own.has(one):
        return gap(own.gaps.get(one, "not in the suite of this evaluation"))
    interval, points = own.mean(one), own.points(one)
    seeds = ", ".join(map(number, points))
    title = f"{one.label}; {origin([own])}; each seed: {seeds}"
    note = " this policy only" if len(points) < INTERVAL_FROM else ""
    return Cell(number(interval.value), title, tone, small=f"{span(interval)}{note}")


def elsewhere(study: Study, suffix: str) -> list[Section]:
    """Build a heat map for each kind of other world, and those of occlusion."""
    sections = []
    kinds: dict[tuple[str, ...], list[Condition]] = {}
    for one in study.conditions:
        if one.kind == "world":
            kinds.setdefault(tuple(study.row(one)["world"]), []).append(one)
    for number_, (keys, conditions) in enumerate(kinds.items()):
        what = ", ".join(keys)
        section = Section(
            f"worlds{number_}{suffix}",
            f"Other worlds: {what}",
            "Each method as it was trained, tested where it never was. A "
            f"{study.unit} belongs to the world of its own row"
            + (": 0 and 1 are that world's baselines." if _scored(study) else "."),
        )
        rows = [("as trained", AS_IS), *((one.label, one) for one in conditions)]
        section.blocks.append(heat_map(study.measured, rows, "tested in"))
        sections.append(section)
    return [*sections, *_occlusion(study, suffix)]


def _scored(study: Study) -> bool:
    return study.unit == "score"


def _occlusion(study: Study, suffix: str) -> list[Section]:
    labels = [
        label
        for label in study.labels("area")
        if study.row(Condition("area", label))["perturbation"] == OCCLUDE
    ]
    if not labels:
        return []
    section = Section(
        f"occlusion{suffix}",
        "Missing tokens",
        "The same at each share of tokens that is hidden.",
    )
    for label in labels:
        rungs = [Condition("rung", label, s) for s in study.severities(label) if s]
        rows = [("none", AS_IS), *((f"{one.severity:.0%}", one) for one in rungs)]
        blocks: list[Block] = [Heading(label), heat_map(study.measured, rows, "hidden")]
        section.blocks += blocks
    return [section]


def origin(measured: Sequence[Measured]) -> str:
    """Where numbers come from, for a title."""
    texts = []
    for own in measured:
        seeds = ", ".join(str(source.seed) for source in own.method.evaluated)
        first = own.method.evaluated[0].evaluation
        assert first is not None
        episodes = first.about["episodes"]
        texts.append(
            f"{own.method.name}: training seeds {seeds}, {episodes} episodes each, "
            f"{first.path.name}"
        )
    return "; ".join(texts)
