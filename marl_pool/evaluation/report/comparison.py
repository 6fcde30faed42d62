"""Comparison of methods: ranking and probability of improvement."""

from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd

from marl_pool.evaluation.plots import draw_points
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.group_scores import (
    UNPERTURBED,
    Condition,
    GroupScores,
    MethodScores,
    joint_provenance,
)
from marl_pool.evaluation.report.robustness import trained_in
from marl_pool.evaluation.statistics.comparison import (
    INTERVAL_FROM,
    RANKED_FROM,
    improvement,
    rank,
)
from marl_pool.evaluation.statistics.intervals import (
    Interval,
    interquartile_score,
)
from marl_pool.utils.plotting import LineStyle

FEW = "fewer than two seeds of a method: there is no interval over seeds"
UNDEFINED = (
    "some bootstrap samples of the episodes have no score: there are too few, or the "
    "scripted policy is hardly better than the random one"
)
NOT_SHARED = html.missing_note("The methods have no condition in common.")
NO_SCORE = html.missing_note("Not ranked: no score is defined here, only returns.")
Styles = Mapping[str, LineStyle]
Tasks = Mapping[str, tuple[list[MethodScores], list[Condition]]]
"""The methods of each training environment, and the conditions of their comparison."""


def comparison(group: GroupScores, styles: Styles) -> list[html.PageSection]:
    """Build the sections that compare the methods of one training environment."""
    # Methods of one environment are compared under the conditions that they share.
    tasks = {
        env: (own, group.common(own, "area") or group.common(own, "clean"))
        for env, own in group.envs.items()
    }
    ranking: list[html.Component] = []
    contents = {"ranking": ranking}
    # Returns of different tasks have no common scale, so only scores are ranked.
    if group.unit != "score":
        ranking.append(NO_SCORE)
    else:
        for env, task in tasks.items():
            ranking += [*trained_in(group, env), *_ranked(group, *task, styles)]
        if any(len(own) > 1 for own, _ in tasks.values()):
            contents["improvement"] = _improvement(group, tasks)
    facts = {"unit": group.unit, "ranked_from": RANKED_FROM}
    return [html.PageSection(name, own, facts) for name, own in contents.items()]


def _ranked(
    group: GroupScores,
    measured: Sequence[MethodScores],
    conditions: Sequence[Condition],
    styles: Styles,
) -> list[html.Component]:
    if not conditions:
        return [NOT_SHARED]
    methods = {own.method.kind: own for own in measured}
    scores = {kind: own.under(conditions) for kind, own in methods.items()}
    ranking = rank(scores)
    notes = [html.missing_note(ranking.refusal)] if ranking.refusal else []
    # The figure shows each seed, the table the numbers of each method.
    rows, records = [], []
    for place, (name, value) in enumerate(ranking.places, start=1):
        own, seeds = methods[name], scores[name].points
        points = [float(interquartile_score(run[None])) for run in seeds]
        rows.append((name, points, *value))
        cell = partial(html.Cell, title=own.method.provenance)
        records.append(
            {
                "method": html.Cell(name if notes else f"{place}. {name}"),
                "IQM": cell(html.number(value.value)),
                "95 % over seeds": _interval_cell(value, [own]),
                "seeds": cell(str(len(seeds))),
            }
        )
    names = html.listed([group.named(one) for one in conditions])
    over = "unperturbed episodes alone" if conditions == [UNPERTURBED] else names
    draw = partial(draw_points, rows, styles, "interquartile mean of areas")
    picture = html.figure(draw, f"Over {over}.", joint_provenance(measured))
    return [*notes, picture, pd.DataFrame(records)]


def _interval_cell(value: Interval, own: Sequence[MethodScores]) -> html.Cell:
    if html.span(value):
        return html.Cell(html.span(value), joint_provenance(own))
    return html.missing(_why_unknown(own))


def _why_unknown(own: Sequence[MethodScores]) -> str:
    """The reason why an interval over seeds is unknown."""
    few = min(one.scores.seeds for one in own) < INTERVAL_FROM
    return FEW if few else UNDEFINED


def _improvement(group: GroupScores, tasks: Tasks) -> list[html.Component]:
    components: list[html.Component] = []
    for env, (own, conditions) in tasks.items():
        components += trained_in(group, env)
        if conditions:
            # A shade suggests an order: none for methods that are not ranked.
            ranked = min(one.scores.seeds for one in own) >= RANKED_FROM
            columns = {
                other.method.kind: [
                    _improvement_cell(one, other, conditions, ranked) for one in own
                ]
                for other in own
            }
            heads = {"P(row > column)": [html.Cell(kind) for kind in columns]}
            components.append(pd.DataFrame(heads | columns))
    return components


def _improvement_cell(
    one: MethodScores,
    other: MethodScores,
    conditions: Sequence[Condition],
    ranked: bool,
) -> html.Cell:
    if other is one:
        return html.Cell("")
    value = improvement(one.under(conditions), other.under(conditions))
    title = "" if html.span(value) else f"{_why_unknown([one, other])}; "
    title += joint_provenance([one, other])
    # White is 0.5.
    tone = 2 * value.value - 1 if ranked else None
    small = html.span(value) or "no interval"
    return html.Cell(html.number(value.value), title, tone, small=small)
