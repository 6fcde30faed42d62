"""Measurements of the theory, by `marl-pool diagnose`."""

import math
from collections.abc import Sequence

import pandas as pd

from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.documents import SUMMED, joined
from marl_pool.evaluation.report.methods import Method, recorded
from marl_pool.evaluation.report.runs import ReportedRun
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics.intervals import Interval

SIZES = ("heads", "episodes", "observations")
"""Columns of a diagnosis with sample sizes."""
UNDEFINED = "undefined for this pooling head or environment"


def theory(methods: Sequence[Method]) -> list[html.PageSection]:
    """Build a section for each diagnosed group of agents; none without a diagnosis."""
    runs = [one for method in methods for one in method.runs]
    if not any(one.diagnosis or one.diagnosis_missing for one in runs):
        return []
    known = [one.diagnosis for one in runs if one.diagnosis]
    groups = dict.fromkeys(group for one in known for group in one.rows["group"])
    sections = {group: [_section(methods, group)] for group in groups or [""]}
    return html.by_group(sections)


def _section(methods: Sequence[Method], group: str) -> html.PageSection:
    # One row per run and number.
    rows: list[tuple[str, str, float, str, str]] = []
    reasons: dict[str, str] = {}
    section = html.PageSection("theory", facts={"only": ONLY})
    for method in methods:
        for one in method.runs:
            found = _rows(one, group)
            if isinstance(found, str):
                section.components.append(html.missing_note(f"{one.name}: {found}"))
                reasons.setdefault(method.name, found)
            else:
                rows += [(method.name, *row) for row in found]
    # Make a table with a row for each number and a column for each method.
    frame = pd.DataFrame(rows, columns=["method", "name", "value", "span", "title"])
    parts = dict(iter(frame.groupby(["method", "name"])))
    records = [
        {"": html.Cell(name.replace("_", " "))}
        | {
            method.name: _cell(name, parts[method.name, name], len(method.runs))
            if (method.name, name) in parts
            else html.missing(reasons.get(method.name, UNDEFINED))
            for method in methods
        }
        for name in frame["name"].unique()
    ]
    if records:
        section.components.insert(0, pd.DataFrame(records))
    return section


def _rows(one: ReportedRun, group: str) -> list[tuple[str, float, str, str]] | str:
    """Name, value, interval and provenance of each number, or why there are none."""
    if one.diagnosis is None:
        return one.diagnosis_missing or "it was not diagnosed"
    numbers, about = one.diagnosis.numbers(group), one.diagnosis.about
    if isinstance(numbers, str):
        return numbers
    # The provenance is shown with each cell.
    source = f"{one.relative(one.diagnosis.path)}, commit {recorded(about, 'commit')}"
    source += f", {recorded(about, 'episodes')} episodes"
    rows = []
    for name, value in numbers.items():
        # Neither sample sizes nor the bounds of other numbers have a row.
        stem = name.removesuffix("_low").removesuffix("_high")
        if name not in SIZES and (stem == name or stem not in numbers):
            ends = (numbers.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
            span = html.span(Interval(value, *ends))
            bounds = f" ({span})" if span else ""
            title = f"{source}: {_formatted(name, value)}{bounds}"
            rows.append((name, value, span, title))
    return rows


def _cell(name: str, runs: pd.DataFrame, seeds: int) -> html.Cell:
    few = f"{len(runs)} of {seeds} seeds" if len(runs) < seeds else ""
    small = ", ".join(filter(None, [few, "; ".join(filter(None, runs["span"]))]))
    text = _formatted(name, joined(name, runs["value"]))
    return html.Cell(text, "; ".join(runs["title"]), small=small)


def _formatted(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in SUMMED else html.number(value)
