"""Measurements of the theory, by `marl-pool diagnose`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl_pool.evaluation.report.components import (
    Note,
    PageSection,
    Table,
    TableCell,
    by_group,
    missing,
    number,
    span,
)
from marl_pool.evaluation.report.diagnoses import SUMMED, joined
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.provenance import recorded
from marl_pool.evaluation.report.runs import ReportedRun
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics.intervals import Interval

SIZES = ("heads", "episodes", "observations")
"""Columns of a diagnosis with sample sizes."""


@dataclass(frozen=True)
class _RunNumbers:
    """The numbers of one run, or the reason why it has none."""

    run: ReportedRun
    numbers: Mapping[str, float]
    reason: str = ""

    def interval(self, column: str) -> Interval:
        """A number and its interval over episodes; NaN for missing ones."""
        ends = (self.numbers.get(f"{column}{end}") for end in ("", "_low", "_high"))
        return Interval(*(math.nan if end is None else end for end in ends))

    def provenance(self, column: str) -> str:
        """The number of this run, its file, commit and episodes."""
        assert self.run.diagnosis is not None
        diagnosis, value = self.run.diagnosis, self.interval(column)
        bounds = f" ({span(value)})" if span(value) else ""
        return (
            f"{self.run.relative(diagnosis.path)}, commit "
            f"{recorded(diagnosis.about, 'commit')}, "
            f"{recorded(diagnosis.about, 'episodes')} episodes: "
            f"{_formatted(column, value.value)}{bounds}"
        )


def theory(methods: Sequence[Method]) -> list[PageSection]:
    """Build a section for each diagnosed group of agents; none without a diagnosis."""
    runs = [one for method in methods for one in method.runs]
    if not any(one.diagnosis or one.diagnosis_missing for one in runs):
        return []
    known = [one.diagnosis for one in runs if one.diagnosis]
    groups = dict.fromkeys(group for one in known for group in one.groups)
    return by_group({group: [_section(methods, group)] for group in groups or [""]})


def _section(methods: Sequence[Method], group: str) -> PageSection:
    section = PageSection("theory", facts={"only": ONLY})
    found = {
        method.name: [_numbers(one, group) for one in method.runs] for method in methods
    }
    every = [one for seeds in found.values() for one in seeds]
    columns = dict.fromkeys(c for one in every for c in one.numbers if _shown(c, one))
    lines = []
    for column in columns:
        cells = (_cell(seeds, column) for seeds in found.values())
        lines.append([TableCell(column.replace("_", " ")), *cells])
    if lines:
        section.components.append(Table(["", *found], lines))
    section.components += [
        Note(f"{one.run.name}: {one.reason}", missing=True)
        for one in every
        if one.reason
    ]
    return section


def _numbers(one: ReportedRun, group: str) -> _RunNumbers:
    if one.diagnosis is None:
        return _RunNumbers(one, {}, one.diagnosis_missing or "it was not diagnosed")
    numbers = one.diagnosis.numbers(group)
    if isinstance(numbers, str):
        return _RunNumbers(one, {}, numbers)
    return _RunNumbers(one, numbers)


def _shown(column: str, one: _RunNumbers) -> bool:
    """False for sample sizes and for the bounds of other numbers."""
    stem = column.removesuffix("_low").removesuffix("_high")
    return column not in SIZES and (stem == column or stem not in one.numbers)


def _cell(seeds: Sequence[_RunNumbers], column: str) -> TableCell:
    known = [one for one in seeds if column in one.numbers]
    if not known:
        reasons = [one.reason for one in seeds if one.reason]
        return missing([*reasons, "undefined for this pooling head or environment"][0])
    value = joined(column, [one.numbers[column] for one in known])
    small = [f"{len(known)} of {len(seeds)} seeds"] if len(known) < len(seeds) else []
    spans = filter(None, (span(one.interval(column)) for one in known))
    small += filter(None, ["; ".join(spans)])
    title = "; ".join(one.provenance(column) for one in known)
    return TableCell(_formatted(column, value), title, small=", ".join(small))


def _formatted(column: str, value: float) -> str:
    return f"{value:,.0f}" if column in SUMMED else number(value)
