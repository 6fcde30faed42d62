"""Comparison of methods: ranking, performance profile, improvement, retraining gap."""

from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.report.components import (
    Component,
    Note,
    PageSection,
    Table,
    TableCell,
    figure,
    listed,
    missing,
    number,
    span,
)
from marl_pool.evaluation.report.group_scores import GroupScores, MethodScores
from marl_pool.evaluation.report.plots import Curve, Panel, draw_panels, draw_points
from marl_pool.evaluation.report.provenance import joint_provenance
from marl_pool.evaluation.report.robustness import trained_in
from marl_pool.evaluation.report.table import UNPERTURBED, Condition
from marl_pool.evaluation.statistics.comparison import (
    INTERVAL_FROM,
    RANKED_FROM,
    improvement,
    rank,
    retraining_gap,
)
from marl_pool.evaluation.statistics.intervals import (
    CONFIDENCE,
    Interval,
    interquartile_score,
    optimality_gap,
    performance_profile,
)
from marl_pool.utils.plotting import LineStyle

THRESHOLDS = 121
FEW = "fewer than two seeds of a method: there is no interval over seeds"
UNDEFINED = (
    "some bootstrap samples of the episodes have no score: there are too few, or the "
    "scripted policy is hardly better than the random one"
)
NOT_SHARED = Note("The methods have no condition in common.", missing=True)
Styles = Mapping[str, LineStyle]
Tasks = Mapping[str, tuple[list[MethodScores], list[Condition]]]
"""The methods of each training environment, and the conditions of their comparison."""


def comparison(group: GroupScores, styles: Styles) -> list[PageSection]:
    """Build the sections that compare the methods of one training environment."""
    tasks = {}
    for env in group.envs:
        own = group.of_env(env)
        areas = group.common(own, "area")
        tasks[env] = own, areas or group.common(own, "clean")
    contents = {"ranking": _ranking(group, tasks, styles)}
    if group.unit == "score" and any(len(own) > 1 for own, _ in tasks.values()):
        contents["performance"] = [_performance(group, tasks, styles)]
        contents["improvement"] = _improvement(group, tasks)
    if len(group.envs) > 1:
        contents["retraining"] = [_retraining(group)]
    facts = {"unit": group.unit, "ranked_from": RANKED_FROM}
    return [PageSection(name, own, facts) for name, own in contents.items()]


def _ranking(group: GroupScores, tasks: Tasks, styles: Styles) -> list[Component]:
    if group.unit != "score":
        return [Note("Not ranked: no score is defined here, only returns.", True)]
    components: list[Component] = []
    for env, (own, conditions) in tasks.items():
        components += trained_in(group, env)
        components += _ranked(group, own, conditions, styles)
    return components


def _ranked(
    group: GroupScores,
    own: Sequence[MethodScores],
    conditions: Sequence[Condition],
    styles: Styles,
) -> list[Component]:
    if not conditions:
        return [NOT_SHARED]
    scores = {one.method.kind: one.under(conditions) for one in own}
    ranking = rank(scores)
    rows = []
    for name, value in ranking.places:
        points = [float(interquartile_score(run[None])) for run in scores[name].points]
        rows.append((name, points, *value))
    names = listed([group.named(one) for one in conditions])
    over = "unperturbed episodes alone" if conditions == [UNPERTURBED] else names
    picture = figure(
        lambda: draw_points(rows, styles, "interquartile mean of areas"),
        f"Over {over}.",
        joint_provenance(own),
    )
    refusal = ranking.refusal
    notes = [Note(refusal[0].upper() + refusal[1:] + ".", True)] if refusal else []
    by_kind = {one.method.kind: one for one in own}
    lines = []
    for place, (name, value) in enumerate(ranking.places, start=1):
        one, gap = by_kind[name], float(optimality_gap(scores[name].points))
        lines.append(
            [
                TableCell(name if refusal else f"{place}. {name}"),
                TableCell(number(value.value), one.provenance),
                _interval_cell(value, [one]),
                TableCell(number(gap), one.provenance),
                TableCell(str(one.scores.seeds), one.provenance),
            ]
        )
    head = ["method", "IQM", "95 % over seeds", "optimality gap", "seeds"]
    return [*notes, picture, Table(head, lines)]


def _interval_cell(value: Interval, own: Sequence[MethodScores]) -> TableCell:
    if span(value):
        return TableCell(span(value), joint_provenance(own))
    return missing(_why_unknown(own))


def _why_unknown(own: Sequence[MethodScores]) -> str:
    """The reason why an interval over seeds is unknown."""
    few = min(one.scores.seeds for one in own) < INTERVAL_FROM
    return FEW if few else UNDEFINED


def _performance(group: GroupScores, tasks: Tasks, styles: Styles) -> Component:
    if not any(conditions for _, conditions in tasks.values()):
        return NOT_SHARED

    def draw() -> str:
        panels = [
            Panel(env, _profiles(*task)) for env, task in tasks.items() if task[1]
        ]
        return draw_panels(
            panels,
            styles,
            xlabel="score",
            ylabel="fraction of runs above",
            columns=2,
            height=3.0,
            dots=False,
            steps=True,
        )

    caption = "Run-score distributions, averaged over perturbations."
    return figure(draw, caption, joint_provenance(group.measured))


def _profiles(
    own: Sequence[MethodScores], conditions: Sequence[Condition]
) -> list[Curve]:
    """The performance profile of each method, with its band over seeds."""
    scores = [one.under(conditions) for one in own]
    every = np.concatenate([one.points.ravel() for one in scores])
    margin = 0.05 * float(np.ptp(every)) or 0.1
    grid = np.linspace(every.min() - margin, every.max() + margin, THRESHOLDS)
    tail = 50 * (1 - CONFIDENCE)
    curves = []
    for one, own_scores in zip(own, scores, strict=True):
        value = performance_profile(own_scores.points, grid)
        low = high = np.full(len(grid), np.nan)
        resampled = own_scores.resampled()
        if own_scores.seeds >= INTERVAL_FROM and np.isfinite(resampled).all():
            profiles = performance_profile(resampled, grid)
            low, high = np.percentile(profiles, (tail, 100 - tail), axis=0)
        no_points = np.empty((0, len(grid)))
        curves.append(Curve(one.method.kind, grid, value, low, high, no_points))
    return curves


def _improvement(group: GroupScores, tasks: Tasks) -> list[Component]:
    components: list[Component] = []
    for env, (own, conditions) in tasks.items():
        components += trained_in(group, env)
        if conditions:
            head = ["P(row > column)", *(one.method.kind for one in own)]
            lines = [_improvement_line(one, own, conditions) for one in own]
            components.append(Table(head, lines))
    return components


def _improvement_line(
    one: MethodScores, own: Sequence[MethodScores], conditions: Sequence[Condition]
) -> list[TableCell]:
    ranked = min(other.scores.seeds for other in own) >= RANKED_FROM
    line = [TableCell(one.method.kind)]
    for other in own:
        if other is one:
            line.append(TableCell(""))
            continue
        value = improvement(one.under(conditions), other.under(conditions))
        title = "" if span(value) else f"{_why_unknown([one, other])}; "
        title += joint_provenance([one, other])
        # A shade (white is 0.5) suggests an order: none for methods that aren't ranked.
        tone = 2 * value.value - 1 if ranked else None
        small = span(value) or "no interval"
        line.append(TableCell(number(value.value), title, tone, small=small))
    return line


def _retraining(group: GroupScores) -> Component:
    first, *rest = group.envs
    pairs = [
        (one, other)
        for one in group.of_env(first)
        for env in rest
        for other in group.of_env(env)
        if other.method.kind == one.method.kind
    ]
    if not pairs:
        return Note("No method was trained in two environments.", missing=True)
    lines = []
    for pair in pairs:
        value = retraining_gap(*(one.under([UNPERTURBED]) for one in pair))
        means = [
            TableCell(number(one.mean(UNPERTURBED).value), one.provenance)
            for one in pair
        ]
        gap = TableCell(number(value.value), joint_provenance(pair))
        name = TableCell(pair[0].method.kind, small=pair[1].method.env)
        lines.append([name, *means, gap, _interval_cell(value, pair)])
    head = ["method", f"in {first}", "in the other env", "gap", "95 % over seeds"]
    return Table(head, lines)
