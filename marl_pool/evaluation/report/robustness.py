"""Scores under perturbations, in other environments and without some tokens."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from marl_pool.envs.options import expand_counts
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.evaluations import AS_TRAINED
from marl_pool.evaluation.report.group_scores import (
    NOT_ASKED,
    UNPERTURBED,
    Condition,
    GroupScores,
    MethodScores,
    joint_provenance,
)
from marl_pool.evaluation.report.plots import Curve, Panel, draw_panels
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics.comparison import INTERVAL_FROM
from marl_pool.utils.plotting import LineStyle

OCCLUDE = "occlude"
LEVELS = {"scripted policy": 1.0, "random policy": 0.0}


def profiles(group: GroupScores, styles: Mapping[str, LineStyle]) -> html.PageSection:
    """Build the section of scores over severity, a panel for each perturbation."""
    labels = [label for label in group.labels("area") if group.levels(label)]
    # A single seed has no interval over seeds.
    fewest = min(own.scores.seeds for own in group.measured)
    section = html.PageSection("profiles", facts={"one_seed": fewest < INTERVAL_FROM})
    if not labels:
        section.components.append(html.missing_note("No perturbation was measured."))
        return section
    for env, own in group.envs.items():
        section.components += trained_in(group, env)
        panels = [_panel(group, own, label) for label in labels]
        # Rows as equal as possible, of four panels at most.
        columns = math.ceil(len(panels) / math.ceil(len(panels) / 4))
        lines = LEVELS if group.unit == "score" else {}
        draw = partial(draw_panels, panels, styles, columns=columns, lines=lines)
        draw = partial(draw, xlabel="severity", ylabel=group.unit)
        caption = f"{group.unit.capitalize()} against severity; 0 is unperturbed."
        section.components.append(html.figure(draw, caption, joint_provenance(own)))
    return section


def trained_in(group: GroupScores, env: str) -> list[Markup]:
    """A heading for the methods of one environment, if there are several."""
    several = len(group.envs) > 1
    return [html.heading(f"Trained and tested in {env}")] if several else []


def _panel(group: GroupScores, measured: Sequence[MethodScores], label: str) -> Panel:
    levels = [UNPERTURBED, *group.levels(label)]
    curves, reasons = [], []
    for own in measured:
        # A curve needs two severities or more.
        known = [one for one in levels if one in own.conditions]
        if len(known) > 1:
            value, *band = np.array([own.mean(one) for one in known]).T
            severities = np.array([one.severity for one in known])
            points = own.under(known).points
            shape = (severities, value, np.stack(band), points)
            curves.append(Curve(own.method.kind, *shape))
        lost = [own.missing[one] for one in levels if one in own.missing]
        reasons += [f"{own.method.kind} not measured: {lost[0]}"] if lost else []
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
    # Make a row for each perturbation, and a column for each method.
    rows = {"unperturbed": UNPERTURBED}
    rows |= {group.named(one): one for one in group.of_kind("area")}
    columns = {
        own.method.name: [score_cell(group, own, one) for one in rows.values()]
        for own in group.measured
    }
    heads = {"perturbation": [html.Cell(name) for name in rows]}
    return html.PageSection("areas", [pd.DataFrame(heads | columns)])


def score_cell(group: GroupScores, own: MethodScores, one: Condition) -> html.Cell:
    """The score of a method under a condition, with its interval.

    Returns have no shade: those of different environments have no common scale.
    """
    if one not in own.conditions:
        return html.missing(own.missing.get(one, NOT_ASKED))
    interval, points = own.mean(one), own.points(one)
    seeds = ", ".join(map(html.number, points))
    title = f"{group.named(one)}; {own.method.provenance}; each seed: {seeds}"
    note = f" {ONLY}" if len(points) < INTERVAL_FROM else ""
    small = f"{html.span(interval)}{note}" if html.span(interval) else "no interval"
    tone = html.shade(interval.value) if group.unit == "score" else None
    return html.Cell(html.number(interval.value), title, tone, small=small)


def transfer(group: GroupScores) -> list[html.PageSection]:
    """Build the sections of tests in other environments and of missing tokens.

    Each has a heat map for every head, with a row for each training condition and a
    column for each test condition. If no head was trained under several, one heat map
    has the methods as its rows.
    """
    # Environments that differ in the same options, such as numbers of agents.
    families: dict[tuple[str, ...], list[Condition]] = {}
    for one in group.of_kind("environment"):
        families.setdefault(tuple(group.row(one)["transfer_env"]), []).append(one)
    sections = [
        html.PageSection(
            "transfer",
            _environments(group, conditions),
            {"options": ", ".join(keys), "unit": group.unit},
            str(place),
        )
        for place, (keys, conditions) in enumerate(families.items())
    ]
    # Tokens occluded in the test, by the fraction occluded in training.
    tokens: list[html.Component] = []
    for label in group.labels("level"):
        levels = group.levels(label)
        if levels and group.row(levels[0])["perturbation"] == OCCLUDE:
            columns = {"0%": UNPERTURBED} | {f"{c.severity:.0%}": c for c in levels}
            named = [(_head(own), _occluded(own), own) for own in group.measured]
            maps = _maps(group, named, columns, "missing in training")
            tokens += [html.heading(label), *maps]
    if tokens:
        sections.append(html.PageSection("occlusion", tokens, {"unit": group.unit}))
    return sections


def _environments(
    group: GroupScores, conditions: Sequence[Condition]
) -> list[html.Component]:
    evaluation = group.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    same = evaluation.protocol["env"] == AS_TRAINED
    unchanged = AS_TRAINED if same else "as evaluated"
    # A test environment may be the training environment of a method.
    homes = [_training_env(group, own, conditions) for own in group.measured]
    # Test environments are columns; add the unchanged one if it is not among them.
    columns = {group.named(one): one for one in conditions}
    if not all(homes):
        columns = {unchanged: UNPERTURBED, **columns}

    def name(own: MethodScores, home: Condition | None) -> str:
        env = group.named(home) if home else own.method.env or unchanged
        return " ".join(filter(None, (env, own.method.perturbed)))

    # Rows in the order of the columns put equal environments on the diagonal.
    order = [*conditions, None]
    rows = sorted(
        zip(group.measured, homes, strict=True), key=lambda row: order.index(row[1])
    )
    named = [(own.method.head, name(own, home), own) for own, home in rows]
    return _maps(group, named, columns, "trained in")


def _training_env(
    group: GroupScores, own: MethodScores, conditions: Sequence[Condition]
) -> Condition | None:
    """The test environment that equals the training environment of a method."""
    env = own.method.runs[0].run.env
    for one in conditions:
        tested = {**env, **group.row(one)["transfer_env"]}
        if expand_counts(tested) == expand_counts(env):
            return one
    return None


def _head(own: MethodScores) -> str:
    return " · ".join(filter(None, (own.method.head, own.method.env)))


def _occluded(own: MethodScores) -> str:
    """The fraction of tokens occluded in training, and other perturbations in it."""
    config = own.method.runs[0].run.config
    share = occluded_in_training(config)
    if isinstance(share, list):
        return " to ".join(f"{end:.0%}" for end in share)
    name = (config.get("perturbation") or {}).get("name", "none")
    other = f", {own.method.perturbed}" if name not in ("none", OCCLUDE) else ""
    return f"{share:.0%}{other}"


def occluded_in_training(config: Mapping[str, Any]) -> float | list[float]:
    """The fraction of tokens missing in a run's training, or its bounds."""
    perturbation = config.get("perturbation") or {}
    if perturbation.get("name") != OCCLUDE:
        return 0.0
    severity = perturbation["severity"]
    bounds = (config.get("clone") or {}).get("severities") or severity
    return bounds if isinstance(bounds, list) else float(severity)


def _maps(
    group: GroupScores,
    rows: Sequence[tuple[str, str, MethodScores]],
    columns: Mapping[str, Condition],
    corner: str,
) -> list[html.Component]:
    """A heat map for each head, or one of all methods if each head has one row.

    Args:
        group: scores of the group.
        rows: head, name in its heat map, and scores of each method.
        columns: conditions by heading.
        corner: heading of the names.
    """
    if len({head for head, _, _ in rows}) == len(rows):
        rows = [("", own.method.name, own) for own in group.measured]
        corner = "method"
    maps: list[html.Component] = []
    frame = pd.DataFrame(rows, columns=["head", "name", "scores"])
    for head, part in frame.groupby("head", sort=False):
        cells = {corner: [html.Cell(name) for name in part["name"]]} | {
            name: [score_cell(group, own, one) for own in part["scores"]]
            for name, one in columns.items()
        }
        maps += [html.heading(str(head))] if head else []
        maps.append(pd.DataFrame(cells))
    return maps
