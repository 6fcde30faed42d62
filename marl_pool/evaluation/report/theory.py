"""What theory says of the policies, as `marl-pool diagnose` measured it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl_pool.evaluation.report.components import (
    Cell,
    Note,
    Section,
    Table,
    gap,
    number,
    span,
)
from marl_pool.evaluation.report.diagnosed import SUMMED
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.provenance import recorded
from marl_pool.evaluation.report.sources import Source
from marl_pool.evaluation.results import ONLY
from marl_pool.evaluation.statistics import Interval

SIZES = ("heads", "episodes", "observations")
"""Columns of a diagnosis that say how much was measured, and are no results."""


@dataclass(frozen=True)
class _Found:
    """One run's numbers, or why it has none."""

    source: Source
    numbers: Mapping[str, float]
    reason: str = ""

    def interval(self, column: str) -> Interval:
        """A number and its interval over episodes, NaN for what it has not."""
        ends = (self.numbers.get(f"{column}{end}") for end in ("", "_low", "_high"))
        return Interval(*(math.nan if end is None else end for end in ends))

    def origin(self, column: str) -> str:
        """One run's number, and where it is from."""
        assert self.source.diagnosis is not None
        diagnosis, value = self.source.diagnosis, self.interval(column)
        bounds = f" ({span(value)})" if span(value) else ""
        return (
            f"{self.source.where(diagnosis.path)}, commit "
            f"{recorded(diagnosis.about, 'commit')}, "
            f"{recorded(diagnosis.about, 'episodes')} episodes: "
            f"{_written(column, value.value)}{bounds}"
        )


def theory(methods: Sequence[Method]) -> list[Section]:
    """Build a section for each group that was diagnosed; none if no run was."""
    sources = [source for method in methods for source in method.sources]
    if not any(source.diagnosis or source.diagnosis_gap for source in sources):
        return []
    known = [source.diagnosis for source in sources if source.diagnosis]
    groups = list(dict.fromkeys(group for one in known for group in one.groups))
    if not groups:
        return [_section(methods, "", "")]
    several = len(groups) > 1
    return [
        _section(
            methods,
            group,
            f"-{place}" if several else "",
            f" ({group})" if several else "",
        )
        for place, group in enumerate(groups)
    ]


def _section(
    methods: Sequence[Method], group: str, suffix: str, title: str = ""
) -> Section:
    section = Section(
        f"theory{suffix}",
        f"Theory on these policies{title}",
        "Signal loss and the bounds of Theorem 3.12 of the AdaPool paper, as "
        "marl-pool diagnose measured them: means over heads and seeds; of weights "
        "that were checked against their bounds, and of violations, the sum over "
        f"seeds. Intervals are over episodes: each is for {ONLY}.",
    )
    found = {
        method.name: [_found(source, group) for source in method.sources]
        for method in methods
    }
    every = [one for seeds in found.values() for one in seeds]
    columns = dict.fromkeys(
        column for one in every for column in one.numbers if _is_result(column, one)
    )
    if columns:
        head = ["", *found]
        lines = [
            [
                Cell(column.replace("_", " ")),
                *(_cell(seeds, column) for seeds in found.values()),
            ]
            for column in columns
        ]
        section.blocks.append(Table(head, lines))
    section.blocks += [
        Note(f"{one.source.name}: {one.reason}", gap=True)
        for one in every
        if one.reason
    ]
    return section


def _found(source: Source, group: str) -> _Found:
    if source.diagnosis is None:
        return _Found(source, {}, source.diagnosis_gap or "it was not diagnosed")
    numbers = source.diagnosis.numbers(group)
    if isinstance(numbers, str):
        return _Found(source, {}, numbers)
    return _Found(source, numbers)


def _is_result(column: str, one: _Found) -> bool:
    """Whether it is a number by itself, no size and no bound of another one."""
    stem = column.removesuffix("_low").removesuffix("_high")
    return column not in SIZES and (stem == column or stem not in one.numbers)


def _cell(seeds: Sequence[_Found], column: str) -> Cell:
    """The mean, or the sum, over the seeds that have a number."""
    known = [one for one in seeds if column in one.numbers]
    if not known:
        reasons = [one.reason for one in seeds if one.reason]
        return gap(reasons[0] if reasons else "undefined for this head or this world")
    values = [one.numbers[column] for one in known]
    value = sum(values) / (1 if column in SUMMED else len(values))
    small = [f"{len(known)} of {len(seeds)} seeds"] if len(known) < len(seeds) else []
    spans = [span(one.interval(column)) for one in known]
    small += ["; ".join(filter(None, spans))] if any(spans) else []
    title = "; ".join(one.origin(column) for one in known)
    return Cell(_written(column, value), title, small=", ".join(small))


def _written(column: str, value: float) -> str:
    return f"{value:,.0f}" if column in SUMMED else number(value)
