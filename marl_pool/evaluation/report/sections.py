"""Sections of learning curves, of scores, and of methods compared by their scores."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from marl_pool.evaluation.plots import Curve, Panel, draw_panels, draw_points
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.frame import (
    AREA,
    ENVIRONMENT,
    LEVEL,
    shared,
    shared_areas,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.results import CLEAN, ONLY
from marl_pool.evaluation.statistics.intervals import Interval, interquartile_score
from marl_pool.evaluation.statistics.scores import (
    INTERVAL_FROM,
    RANKED_FROM,
    Scores,
    improvement,
    joined,
    rank,
)
from marl_pool.files.figures import LineStyle

RETURN = "return_mean"
COUNTS = {
    "env_steps": "environment steps",
    "batches": "batches",
    "iteration": "iterations",
}
"""Columns that measure training progress, in order of preference."""
POINTS = 120
"""Maximum points of a curve; a longer one is averaged over that many intervals."""
OCCLUDE = "occlude"
LEVELS = {"scripted policy": 1.0, "random policy": 0.0}
NO_SCORE = html.missing_note("Not ranked: no score is defined here, only returns.")
Styles = Mapping[str, LineStyle]


# Learning curves


def learning_curves(methods: Sequence[Method], styles: Styles) -> html.PageSection:
    """Build the section of learning curves, a panel for each training environment."""
    # Choose a measure of progress that all runs logged.
    runs = [run for method in methods for run in method.runs]
    logged = [run.metrics.columns for run in runs if len(run.metrics)]
    counts = [key for key in COUNTS if all(key in columns for columns in logged)]
    count = counts[0] if counts else "iteration"

    # Collect progress and return of each run with two points or more.
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
        kind_curves: dict[str, list[np.ndarray]] = {}
        for method in (method for method in methods if method.env == env):
            names = [run.name for run in method.runs if run.name in seeds]
            curves_of_seeds = [seeds[name] for name in names]
            if names and _overlap(curves_of_seeds):
                kind_curves[method.kind] = curves_of_seeds
            elif names:
                reasons.setdefault("no training in common", []).extend(names)
        curves = [_mean(*item) for item in kind_curves.items()]
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
        html.missing_note(f"{html.join_words(names)}: {reason}.")
        for reason, names in reasons.items()
    ]
    return section


def _overlap(seeds: Sequence[np.ndarray]) -> bool:
    """Return True if all curves have some training in common."""
    return max(seed[0, 0] for seed in seeds) < min(seed[0, -1] for seed in seeds)


def _mean(kind: str, seeds: Sequence[np.ndarray]) -> Curve:
    """Interpolate seeds on one grid, up to the end of the shortest, and average."""
    start, end = max(seed[0, 0] for seed in seeds), min(seed[0, -1] for seed in seeds)
    grid = np.linspace(start, end, min(POINTS, max(len(seed[0]) for seed in seeds)))
    lines = []
    for seed in seeds:
        chunks = np.array_split(seed, min(POINTS, seed.shape[1]), axis=1)
        smooth = np.stack([chunk.mean(1) for chunk in chunks], 1)
        lines.append(np.interp(grid, *smooth))
    return Curve(kind, grid, np.mean(lines, 0), points=np.stack(lines))


# Scores. Each section takes the rows of one group in `scores_frame`.


def profiles(rows: pd.DataFrame, styles: Styles) -> html.PageSection:
    """Build the section of scores over severity, a panel for each perturbation."""
    unit = rows["unit"].iloc[0]
    levels = rows[(rows["test"] == CLEAN) | (rows["level"] > 0)].sort_values(
        "level", kind="stable"
    )
    highest = rows[rows["test"] == LEVEL].groupby("label", sort=False)["level"].max()
    labels = highest.index[highest > 0]
    # A single seed has no interval over seeds.
    section = html.PageSection("profiles")
    section.facts = {"one_seed": rows["seeds"].min() < INTERVAL_FROM}
    if not len(labels):
        section.components.append(html.missing_note("No perturbation was measured."))
        return section
    for env, env_rows in levels.groupby("env", sort=False):
        section.components += trained_in(rows, env)
        panels = [
            _panel(env_rows[env_rows["label"].isin([CLEAN, label])], label)
            for label in labels
        ]
        # Arrange at most four panels per row, in rows as equal as possible.
        columns = math.ceil(len(panels) / math.ceil(len(panels) / 4))
        lines = LEVELS if unit == "score" else {}
        draw = partial(draw_panels, panels, styles, columns=columns, lines=lines)
        draw = partial(draw, xlabel="severity", ylabel=unit)
        caption = f"{unit.capitalize()} against severity; 0 is unperturbed."
        section.components.append(html.figure(draw, caption, provenance(env_rows)))
    return section


def provenance(rows: pd.DataFrame) -> str:
    """Return the provenance of all numbers in some rows."""
    return "; ".join(rows.sort_index()["provenance"].unique())


def trained_in(rows: pd.DataFrame, env: str) -> list[Markup]:
    """Return a heading for one environment if the methods have several."""
    several = rows["env"].nunique() > 1
    return [html.heading(f"Trained and tested in {env}")] if several else []


def _panel(rows: pd.DataFrame, label: str) -> Panel:
    """Build the panel of all methods from rows in order of severity."""
    curves, reasons = [], []
    for kind, method_rows in rows.groupby("kind", sort=False):
        # A curve needs two severities or more.
        measured = method_rows[method_rows["reason"] == ""]
        if len(measured) > 1:
            band = measured[["low", "high"]].to_numpy().T
            points = joined(measured["scores"]).points
            shape = (measured["level"].to_numpy(), measured["score"].to_numpy())
            curves.append(Curve(kind, *shape, band, points))
        missing = method_rows["reason"][method_rows["reason"] != ""]
        reasons += [f"{kind} not measured: {reason}" for reason in missing[:1]]
    return Panel(label, curves, "; ".join(reasons))


def areas(rows: pd.DataFrame) -> html.PageSection:
    """Build the heat map of areas: perturbations by methods."""
    # Areas are averages of scores.
    if rows["unit"].iloc[0] != "score":
        reason = (
            "Returns of different environments have no common scale, and fractions of "
            "negative returns are meaningless. Scores need a random policy, a better "
            "scripted one, and a single group that learns."
        )
        return html.PageSection("areas", [html.missing_note(reason)])
    area_rows = rows[rows["test"].isin([CLEAN, AREA])]
    conditions = area_rows.drop_duplicates("condition")
    names = conditions["name"].where(conditions["test"] == AREA, "unperturbed")
    columns = area_rows.groupby("method", sort=False)
    cells = {method: _score_cells(column) for method, column in columns}
    heads = {"perturbation": list(map(html.Cell, names))}
    return html.PageSection("areas", [pd.DataFrame(heads | cells)])


def _score_cells(rows: pd.DataFrame) -> list[html.Cell]:
    return [_score_cell(row) for row in rows.itertuples()]


def _score_cell(row: Any) -> html.Cell:
    """Build the cell of a method's score under a condition, with its interval.

    Returns get no shade: in different environments they have no common scale.
    """
    if row.reason:
        return html.missing_cell(row.reason)
    span = html.format_interval(Interval(row.score, row.low, row.high))
    seeds = ", ".join(map(html.format_number, row.scores.points[:, 0]))
    title = f"{row.name}; {row.provenance}; each seed: {seeds}"
    note = f" {ONLY}" if row.seeds < INTERVAL_FROM else ""
    small = f"{span}{note}" if span else "no interval"
    tone = html.score_tone(row.score) if row.unit == "score" else None
    return html.Cell(html.format_number(row.score), title, tone, small=small)


def transfer(rows: pd.DataFrame) -> list[html.PageSection]:
    """Build the sections of tests in other environments and of missing tokens.

    Each has heat maps with a row for each method and a column for each test condition.
    """
    facts = {"unit": rows["unit"].iloc[0]}
    # Group environments by the options that differ, such as the number of agents.
    envs = rows[rows["test"] == ENVIRONMENT]
    families = envs.groupby(envs["transfer_env"].map(", ".join), sort=False)
    sections = [
        html.PageSection(
            "transfer", [_map(rows, tests)], {**facts, "options": keys}, str(place)
        )
        for place, (keys, tests) in enumerate(families)
    ]
    # Map the tokens occluded in the test.
    occluded = rows[(rows["perturbation"] == OCCLUDE) & (rows["level"] > 0)]
    tokens: list[html.Component] = []
    for label, levels in occluded.groupby("label", sort=False):
        tests = levels.sort_values("level", kind="stable")
        columns = [f"{100 * level:g}%" for level in tests["level"]]
        tokens += [html.heading(label), _map(rows, tests.assign(column=columns))]
    if tokens:
        sections.append(html.PageSection("occlusion", tokens, facts))
    return sections


def _map(rows: pd.DataFrame, tests: pd.DataFrame) -> pd.DataFrame:
    """Build a heat map of the methods, unperturbed and under some tests."""
    clean = rows[rows["test"] == CLEAN]
    tests = tests.assign(column=tests.get("column", tests["name"]))
    columns = pd.concat([clean.assign(column="unperturbed"), tests])
    # Two columns may share a heading, since users choose labels.
    headings, cells = ["method"], [[html.Cell(method) for method in clean["method"]]]
    for _, column in columns.groupby("condition", sort=False):
        headings.append(column["column"].iloc[0])
        cells.append(_score_cells(column))
    return pd.DataFrame(dict(enumerate(cells))).set_axis(headings, axis=1)


# Comparison of methods


def comparison(rows: pd.DataFrame, styles: Styles) -> list[html.PageSection]:
    """Build the sections that compare the methods of one training environment."""
    unit = rows["unit"].iloc[0]
    facts = {"unit": unit, "ranked_from": RANKED_FROM}
    # Returns of different tasks have no common scale, so only scores are ranked.
    if unit != "score":
        return [html.PageSection("ranking", [NO_SCORE], facts)]
    ranking: list[html.Component] = []
    matrices: list[html.Component] = []
    for env, env_rows in rows.groupby("env", sort=False):
        # Methods of one environment are compared under the conditions that they share.
        compared = shared_areas(env_rows)
        if compared.empty:
            compared = shared(env_rows[env_rows["test"] == CLEAN])
        ranking += trained_in(rows, env)
        matrices += trained_in(rows, env)
        if len(compared):
            ranking += _ranking(compared, styles)
            matrices.append(_improvements(compared))
        else:
            ranking.append(
                html.missing_note("The methods have no condition in common.")
            )
    sections = [html.PageSection("ranking", ranking, facts)]
    if (rows.groupby("env")["method"].nunique() > 1).any():
        sections.append(html.PageSection("improvement", matrices, facts))
    return sections


def scores_by_kind(rows: pd.DataFrame) -> dict[str, Scores]:
    """Join the scores of each method in rows of one environment, over conditions."""
    methods = rows.groupby("kind", sort=False)["scores"]
    return {kind: joined(scores) for kind, scores in methods}


def _ranking(rows: pd.DataFrame, styles: Styles) -> list[html.Component]:
    scores = scores_by_kind(rows)
    sources = rows.groupby("kind")["provenance"].first()
    ranking = rank(scores)
    notes = [html.missing_note(ranking.refusal)] if ranking.refusal else []
    # The figure shows each seed, the table the numbers of each method.
    drawn, records = [], []
    for place, (kind, value) in enumerate(ranking.places, start=1):
        seeds = scores[kind].points
        points = [float(interquartile_score(run[None])) for run in seeds]
        drawn.append((kind, points, *value))
        cell = partial(html.Cell, title=sources[kind])
        span = html.format_interval(value)
        interval = cell(span) if span else html.missing_cell(_why_unknown(scores[kind]))
        records.append(
            {
                "method": html.Cell(kind if notes else f"{place}. {kind}"),
                "IQM": cell(html.format_number(value.value)),
                "95 % over seeds": interval,
                "seeds": cell(str(len(seeds))),
            }
        )
    names = html.join_words(list(rows.drop_duplicates("condition")["name"]))
    is_clean = (rows["test"] == CLEAN).all()
    scope = "unperturbed episodes alone" if is_clean else names
    draw = partial(draw_points, drawn, styles, "interquartile mean of areas")
    picture = html.figure(draw, f"Over {scope}.", provenance(rows))
    return [*notes, picture, pd.DataFrame(records)]


def _why_unknown(*scores: Scores) -> str:
    if min(method_scores.seeds for method_scores in scores) < INTERVAL_FROM:
        return "a method has fewer than two seeds: there is no interval over seeds"
    return (
        "some bootstrap samples of the episodes have no score: there are too few, or "
        "the scripted policy is hardly better than the random one"
    )


def _improvements(rows: pd.DataFrame) -> pd.DataFrame:
    # A shade suggests an order, so methods that are not ranked get none.
    scores = scores_by_kind(rows)
    ranked = not rank(scores).refusal
    sources = rows.groupby("kind")["provenance"].first()
    columns = {"P(row > column)": [html.Cell(kind) for kind in scores]}
    for kind in scores:
        columns[kind] = []
        for better in scores:
            if better == kind:
                columns[kind].append(html.Cell(""))
                continue
            value = improvement(scores[better], scores[kind])
            span = html.format_interval(value)
            title = "" if span else f"{_why_unknown(scores[better], scores[kind])}; "
            title += f"{sources[better]}; {sources[kind]}"
            # White is 0.5.
            tone = 2 * value.value - 1 if ranked else None
            small = span or "no interval"
            cell = html.Cell(html.format_number(value.value), title, tone, small=small)
            columns[kind].append(cell)
    return pd.DataFrame(columns)
