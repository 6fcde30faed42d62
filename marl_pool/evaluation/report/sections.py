"""Sections of learning curves, of scores, and of methods compared by their scores."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from markupsafe import Markup

from marl_pool.evaluation.plots import Curve, Panel, draw_panels, draw_points
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.group_scores import (
    NOT_ASKED,
    UNPERTURBED,
    Condition,
    GroupScores,
    MethodScores,
    joint_provenance,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics.intervals import interquartile_score
from marl_pool.evaluation.statistics.scores import (
    INTERVAL_FROM,
    RANKED_FROM,
    improvement,
    rank,
)
from marl_pool.files.figures import LineStyle

RETURN = "return_mean"
COUNTS = {
    "env_steps": "environment steps",
    "batches": "batches",
    "iteration": "iterations",
}
"""Columns of the progress of training, in order of preference."""
POINTS = 120
"""Maximal length of a curve; longer ones are averaged over as many intervals."""
OCCLUDE = "occlude"
LEVELS = {"scripted policy": 1.0, "random policy": 0.0}
NO_SCORE = html.missing_note("Not ranked: no score is defined here, only returns.")
Styles = Mapping[str, LineStyle]


# Learning curves


def learning_curves(methods: Sequence[Method], styles: Styles) -> html.PageSection:
    """Build the section of learning curves, a panel for each training environment."""
    # Choose a measure of progress that all runs have logged.
    runs = [run for method in methods for run in method.runs]
    logged = [run.metrics.columns for run in runs if len(run.metrics)]
    counts = [key for key in COUNTS if all(key in columns for columns in logged)]
    count = counts[0] if counts else "iteration"

    # Progress and return of each run with two points or more.
    seeds: dict[str, np.ndarray] = {}
    reasons: dict[str, list[str]] = {}
    for run in runs:
        points = run.metrics.reindex(columns=[count, RETURN]).to_numpy().T
        points = points[:, np.isfinite(points).all(0)]
        if points.shape[1] > 1:
            seeds[run.name] = points
        else:
            reason = run.metrics_missing or f"no {RETURN} in metrics.csv"
            reasons.setdefault(reason, []).append(run.name)

    # Make a panel for each training environment, with the mean over seeds.
    panels = []
    for env in dict.fromkeys(method.env for method in methods):
        kind_curves = {
            method.kind: [seeds[run.name] for run in method.runs if run.name in seeds]
            for method in methods
            if method.env == env
        }
        curves = [
            _mean(kind, curves_of_seeds)
            for kind, curves_of_seeds in kind_curves.items()
            if curves_of_seeds
        ]
        panels.append(Panel(f"trained in {env}" if env else "", curves))
    # Add the figure, and the reasons for missing curves.
    section = html.PageSection("learning")
    if seeds:
        draw = partial(draw_panels, panels, styles, columns=2, height=3.4, dots=False)
        draw = partial(draw, xlabel=COUNTS[count], ylabel="mean return")
        files = [
            run.relative(run.run.metrics_path) for run in runs if run.name in seeds
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


# Scores


def profiles(group: GroupScores, styles: Styles) -> html.PageSection:
    """Build the section of scores over severity, a panel for each perturbation."""
    labels = [label for label in group.labels("area") if group.levels(label)]
    # A single seed has no interval over seeds.
    fewest = min(method_scores.scores.seeds for method_scores in group.measured)
    section = html.PageSection("profiles", facts={"one_seed": fewest < INTERVAL_FROM})
    if not labels:
        section.components.append(html.missing_note("No perturbation was measured."))
        return section
    for env, measured in group.envs.items():
        section.components += trained_in(group, env)
        panels = [_panel(group, measured, label) for label in labels]
        # Rows as equal as possible, of four panels at most.
        columns = math.ceil(len(panels) / math.ceil(len(panels) / 4))
        lines = LEVELS if group.unit == "score" else {}
        draw = partial(draw_panels, panels, styles, columns=columns, lines=lines)
        draw = partial(draw, xlabel="severity", ylabel=group.unit)
        caption = f"{group.unit.capitalize()} against severity; 0 is unperturbed."
        section.components.append(
            html.figure(draw, caption, joint_provenance(measured))
        )
    return section


def trained_in(group: GroupScores, env: str) -> list[Markup]:
    """A heading for the methods of one environment, if there are several."""
    several = len(group.envs) > 1
    return [html.heading(f"Trained and tested in {env}")] if several else []


def _panel(group: GroupScores, measured: Sequence[MethodScores], label: str) -> Panel:
    levels = [UNPERTURBED, *group.levels(label)]
    curves, reasons = [], []
    for scores in measured:
        # A curve needs two severities or more.
        measured_levels = [level for level in levels if level in scores.conditions]
        if len(measured_levels) > 1:
            value, *band = np.array([scores.mean(level) for level in measured_levels]).T
            severities = np.array([level.severity for level in measured_levels])
            points = scores.under(measured_levels).points
            shape = (severities, value, np.stack(band), points)
            curves.append(Curve(scores.method.kind, *shape))
        level_reasons = [
            scores.missing[level] for level in levels if level in scores.missing
        ]
        if level_reasons:
            reasons.append(f"{scores.method.kind} not measured: {level_reasons[0]}")
    return Panel(label, curves, "; ".join(reasons))


def areas(group: GroupScores) -> html.PageSection:
    """Build the heat map of areas: perturbations by methods."""
    # Areas are averages of scores.
    if group.unit != "score":
        reason = (
            "Returns of different environments have no common scale, and fractions of "
            "negative returns are meaningless. Scores need a random policy, a better "
            "scripted one, and a single group that learns."
        )
        return html.PageSection("areas", [html.missing_note(reason)])
    rows = {"unperturbed": UNPERTURBED}
    rows |= {group.named(area): area for area in group.of_kind("area")}
    columns = {
        scores.method.name: [
            score_cell(group, scores, condition) for condition in rows.values()
        ]
        for scores in group.measured
    }
    heads = {"perturbation": [html.Cell(name) for name in rows]}
    return html.PageSection("areas", [pd.DataFrame(heads | columns)])


def score_cell(
    group: GroupScores, scores: MethodScores, condition: Condition
) -> html.Cell:
    """The score of a method under a condition, with its interval.

    Returns have no shade: in different environments they have no common scale.
    """
    if condition not in scores.conditions:
        return html.missing(scores.missing.get(condition, NOT_ASKED))
    interval, points = scores.mean(condition), scores.points(condition)
    seeds = ", ".join(map(html.number, points))
    title = f"{group.named(condition)}; {scores.method.provenance}; each seed: {seeds}"
    note = f" {ONLY}" if len(points) < INTERVAL_FROM else ""
    small = f"{html.span(interval)}{note}" if html.span(interval) else "no interval"
    tone = html.shade(interval.value) if group.unit == "score" else None
    return html.Cell(html.number(interval.value), title, tone, small=small)


def transfer(group: GroupScores) -> list[html.PageSection]:
    """Build the sections of tests in other environments and of missing tokens.

    Each has heat maps with a row for each method and a column for each test condition.
    """
    # Environments that differ in the same options, such as numbers of agents.
    families: dict[tuple[str, ...], list[Condition]] = {}
    for test in group.of_kind("environment"):
        families.setdefault(tuple(group.row(test)["transfer_env"]), []).append(test)
    sections = [
        html.PageSection(
            "transfer",
            [_map(group, {group.named(test): test for test in conditions})],
            {"options": ", ".join(keys), "unit": group.unit},
            str(place),
        )
        for place, (keys, conditions) in enumerate(families.items())
    ]
    # Tokens occluded in the test.
    tokens: list[html.Component] = []
    for label in group.labels("level"):
        levels = group.levels(label)
        if levels and group.row(levels[0])["perturbation"] == OCCLUDE:
            columns = {f"{level.severity:.0%}": level for level in levels}
            tokens += [html.heading(label), _map(group, columns)]
    if tokens:
        sections.append(html.PageSection("occlusion", tokens, {"unit": group.unit}))
    return sections


def _map(group: GroupScores, columns: Mapping[str, Condition]) -> pd.DataFrame:
    """A heat map of the methods under conditions, by heading."""
    cells = {"method": [html.Cell(scores.method.name) for scores in group.measured]}
    for name, condition in {"unperturbed": UNPERTURBED, **columns}.items():
        cells[name] = [
            score_cell(group, scores, condition) for scores in group.measured
        ]
    return pd.DataFrame(cells)


# Comparison of methods


def comparison(group: GroupScores, styles: Styles) -> list[html.PageSection]:
    """Build the sections that compare the methods of one training environment."""
    facts = {"unit": group.unit, "ranked_from": RANKED_FROM}
    # Returns of different tasks have no common scale, so only scores are ranked.
    if group.unit != "score":
        return [html.PageSection("ranking", [NO_SCORE], facts)]
    ranking: list[html.Component] = []
    matrices: list[html.Component] = []
    for env, measured in group.envs.items():
        # Methods of one environment are compared under the conditions that they share.
        conditions = group.common(measured, "area") or group.common(measured, "clean")
        ranking += trained_in(group, env)
        matrices += trained_in(group, env)
        if conditions:
            ranking += _ranking(group, measured, conditions, styles)
            matrices.append(_improvements(measured, conditions))
        else:
            ranking.append(
                html.missing_note("The methods have no condition in common.")
            )
    sections = [html.PageSection("ranking", ranking, facts)]
    if any(len(measured) > 1 for measured in group.envs.values()):
        sections.append(html.PageSection("improvement", matrices, facts))
    return sections


def _ranking(
    group: GroupScores,
    measured: Sequence[MethodScores],
    conditions: Sequence[Condition],
    styles: Styles,
) -> list[html.Component]:
    methods = {method_scores.method.kind: method_scores for method_scores in measured}
    scores = {
        kind: method_scores.under(conditions) for kind, method_scores in methods.items()
    }
    ranking = rank(scores)
    notes = [html.missing_note(ranking.refusal)] if ranking.refusal else []
    # The figure shows each seed, the table the numbers of each method.
    rows, records = [], []
    for place, (name, value) in enumerate(ranking.places, start=1):
        method_scores, seeds = methods[name], scores[name].points
        points = [float(interquartile_score(run[None])) for run in seeds]
        rows.append((name, points, *value))
        cell = partial(html.Cell, title=method_scores.method.provenance)
        span = html.span(value)
        interval = cell(span) if span else html.missing(_why_unknown(method_scores))
        records.append(
            {
                "method": html.Cell(name if notes else f"{place}. {name}"),
                "IQM": cell(html.number(value.value)),
                "95 % over seeds": interval,
                "seeds": cell(str(len(seeds))),
            }
        )
    names = html.listed([group.named(condition) for condition in conditions])
    scope = "unperturbed episodes alone" if conditions == [UNPERTURBED] else names
    draw = partial(draw_points, rows, styles, "interquartile mean of areas")
    picture = html.figure(draw, f"Over {scope}.", joint_provenance(measured))
    return [*notes, picture, pd.DataFrame(records)]


def _why_unknown(*measured: MethodScores) -> str:
    if min(method_scores.scores.seeds for method_scores in measured) < INTERVAL_FROM:
        return "fewer than two seeds of a method: there is no interval over seeds"
    return (
        "some bootstrap samples of the episodes have no score: there are too few, or "
        "the scripted policy is hardly better than the random one"
    )


def _improvements(
    measured: Sequence[MethodScores], conditions: Sequence[Condition]
) -> pd.DataFrame:
    # A shade suggests an order: none for methods that are not ranked.
    ranked = (
        min(method_scores.scores.seeds for method_scores in measured) >= RANKED_FROM
    )
    kinds = [scores.method.kind for scores in measured]
    columns = {"P(row > column)": [html.Cell(kind) for kind in kinds]}
    for kind, column in zip(kinds, measured, strict=True):
        columns[kind] = []
        for row in measured:
            if column is row:
                columns[kind].append(html.Cell(""))
                continue
            value = improvement(row.under(conditions), column.under(conditions))
            span = html.span(value)
            title = "" if span else f"{_why_unknown(row, column)}; "
            title += joint_provenance([row, column])
            # White is 0.5.
            tone = 2 * value.value - 1 if ranked else None
            small = span or "no interval"
            cell = html.Cell(html.number(value.value), title, tone, small=small)
            columns[kind].append(cell)
    return pd.DataFrame(columns)
