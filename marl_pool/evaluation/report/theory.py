"""Measurements of the theory, by `marl-pool diagnose`."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.documents import SUMMED, joined
from marl_pool.evaluation.report.methods import Method, recorded
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics.intervals import Interval

ENDS = ("", "_low", "_high")
SIZES = ("heads", "episodes", "observations")
"""Columns of a diagnosis with sample sizes."""


def theory(methods: Sequence[Method]) -> list[html.PageSection]:
    """Build a section for each diagnosed group of agents; none without a diagnosis."""
    runs = [one for method in methods for one in method.runs]
    if not any(one.diagnosis or one.diagnosis_missing for one in runs):
        return []
    known = [one.diagnosis for one in runs if one.diagnosis]
    groups = dict.fromkeys(group for one in known for group in one.rows["group"])
    return html.by_group(
        {group: [_section(methods, group)] for group in groups or [""]}
    )


def _section(methods: Sequence[Method], group: str) -> html.PageSection:
    # The numbers of each run, or the reason why there are none.
    numbers: dict[str, Mapping[str, float]] = {}
    reasons: dict[str, str] = {}
    for one in (one for method in methods for one in method.runs):
        found: dict[str, float] | str = one.diagnosis_missing or "it was not diagnosed"
        if one.diagnosis:
            found = one.diagnosis.numbers(group)
        numbers[one.name] = {} if isinstance(found, str) else found
        if isinstance(found, str):
            reasons[one.name] = found
    # Neither sample sizes nor the bounds of other numbers have a row.
    shown = dict.fromkeys(
        name
        for own in numbers.values()
        for name in own
        if name not in SIZES and (_stem(name) == name or _stem(name) not in own)
    )
    columns = {"": [html.Cell(name.replace("_", " ")) for name in shown]} | {
        method.name: [_cell(method, name, numbers, reasons) for name in shown]
        for method in methods
    }
    section = html.PageSection("theory", facts={"only": ONLY})
    section.components += [pd.DataFrame(columns)] if shown else []
    section.components += [
        html.missing_note(f"{name}: {reason}") for name, reason in reasons.items()
    ]
    return section


def _stem(name: str) -> str:
    return name.removesuffix("_low").removesuffix("_high")


def _cell(
    method: Method,
    name: str,
    numbers: Mapping[str, Mapping[str, float]],
    reasons: Mapping[str, str],
) -> html.Cell:
    known = [one for one in method.runs if name in numbers[one.name]]
    if not known:
        own = [reasons[one.name] for one in method.runs if one.name in reasons]
        return html.missing([*own, "undefined for this pooling head or environment"][0])
    values, spans, titles = [], [], []
    for one in known:
        assert one.diagnosis is not None
        path, about = one.diagnosis.path, one.diagnosis.about
        ends = (numbers[one.name].get(f"{name}{end}", math.nan) for end in ENDS)
        interval = Interval(*ends)
        bounds = f" ({html.span(interval)})" if html.span(interval) else ""
        titles.append(
            f"{one.relative(path)}, commit {recorded(about, 'commit')}, "
            f"{recorded(about, 'episodes')} episodes: "
            f"{_formatted(name, interval.value)}{bounds}"
        )
        values.append(interval.value)
        spans.append(html.span(interval))
    few = len(known) < len(method.runs)
    small = [f"{len(known)} of {len(method.runs)} seeds" if few else ""]
    small.append("; ".join(filter(None, spans)))
    text = _formatted(name, joined(name, pd.Series(values)))
    return html.Cell(text, "; ".join(titles), small=", ".join(filter(None, small)))


def _formatted(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in SUMMED else html.number(value)
