"""The cost of perturbations: profiles over severity, and areas under them."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from marl_pool.evaluation.report.components import (
    Component,
    Heading,
    Note,
    PageSection,
    Table,
    TableCell,
    figure,
    missing,
    number,
    shade,
    span,
)
from marl_pool.evaluation.report.group_scores import (
    NOT_ASKED,
    GroupScores,
    MethodScores,
)
from marl_pool.evaluation.report.plots import Curve, Panel, draw_panels
from marl_pool.evaluation.report.provenance import joint_provenance
from marl_pool.evaluation.report.table import UNPERTURBED, Condition
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics.comparison import INTERVAL_FROM
from marl_pool.utils.plotting import LineStyle

LEVELS = {"scripted policy": 1.0, "random policy": 0.0}


def profiles(group: GroupScores, styles: Mapping[str, LineStyle]) -> PageSection:
    """Build the section of scores over severity, a panel for each perturbation."""
    labels = [label for label in group.labels("area") if group.levels(label)]
    fewest = min(own.scores.seeds for own in group.measured)
    facts = {"one_seed": fewest < INTERVAL_FROM}
    components: list[Component] = []
    if not labels:
        components.append(Note("No perturbation was measured.", missing=True))
    for env in group.envs if labels else []:
        own = group.of_env(env)
        components += trained_in(group, env)
        panels = [_panel(group, own, label) for label in labels]
        # Rows as equal as possible, of four panels at most.
        columns = math.ceil(len(panels) / math.ceil(len(panels) / 4))
        lines = LEVELS if group.unit == "score" else None
        draw = partial(draw_panels, panels, styles, columns=columns, lines=lines)
        draw = partial(draw, xlabel="severity", ylabel=group.unit)
        caption = f"{group.unit.capitalize()} against severity; 0 is unperturbed."
        components.append(figure(draw, caption, joint_provenance(own)))
    return PageSection("profiles", components, facts)


def trained_in(group: GroupScores, env: str) -> list[Component]:
    """A heading for the methods of one environment, if there are several."""
    several = len(group.envs) > 1
    return [Heading(f"Trained and tested in {env}")] if several else []


def _panel(group: GroupScores, measured: Sequence[MethodScores], label: str) -> Panel:
    levels = [UNPERTURBED, *group.levels(label)]
    curves, reasons = [], []
    for own in measured:
        known = [one for one in levels if own.has(one)]
        if len(known) > 1:
            value, low, high = np.array([own.mean(one) for one in known]).T
            severities = np.array([one.severity for one in known])
            points = own.under(known).points
            curves.append(Curve(own.method.kind, severities, value, low, high, points))
        lost = [own.missing[one] for one in levels if one in own.missing]
        reasons += [f"{own.method.kind} not measured: {lost[0]}"] if lost else []
    return Panel(label, curves, "; ".join(reasons))


def areas(group: GroupScores) -> PageSection:
    """Build the heat map of areas: perturbations by methods."""
    section = PageSection("areas")
    if group.unit != "score":
        reason = (
            "Returns of different environments have no common scale, and fractions of "
            "negative returns are meaningless. Scores need a random policy, a better "
            "scripted one, and a single group that learns."
        )
        section.components.append(Note(reason, missing=True))
        return section
    rows = {"unperturbed": UNPERTURBED}
    rows |= {group.named(one): one for one in group.of_kind("area")}
    head = ["perturbation", *(own.method.name for own in group.measured)]
    lines = [
        [TableCell(name), *(score_cell(group, own, one) for own in group.measured)]
        for name, one in rows.items()
    ]
    section.components.append(Table(head, lines))
    return section


def score_cell(group: GroupScores, own: MethodScores, one: Condition) -> TableCell:
    """The score of a method under a condition, with its interval.

    Returns have no shade: those of different environments have no common scale.
    """
    if not own.has(one):
        return missing(own.missing.get(one, NOT_ASKED))
    interval, points = own.mean(one), own.points(one)
    seeds = ", ".join(map(number, points))
    title = f"{group.named(one)}; {own.provenance}; each seed: {seeds}"
    note = f" {ONLY}" if len(points) < INTERVAL_FROM else ""
    small = f"{span(interval)}{note}" if span(interval) else "no interval"
    tone = shade(interval.value) if group.unit == "score" else None
    return TableCell(number(interval.value), title, tone, small=small)
