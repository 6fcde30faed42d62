"""Where every number comes from, what is missing, and what theory says."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_pool.evaluation.report.blocks import Cell, Note, Section, Table, gap, number
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.sources import Source
from marl_pool.evaluation.report.study import Study

UNKNOWN = "not recorded"
ALL_HEADS = "all"


def theory(methods: Sequence[Method]) -> Section | None:
    """Build the section of what `marl-pool diagnose` found; None if no run has it."""
    found = {
        method.name: [_diagnosis(source) for source in method.sources]
        for method in methods
    }
    known = [own for seeds in found.values() for own in seeds if own]
    if not known:
        return None
    section = Section(
        "theory",
        "Theory on these policies",
        "Signal loss and the bounds of Theorem 3.12 of the AdaPool paper, as "
        "marl-pool diagnose measured them: means over heads and seeds. Point at a "
        "number to see each seed.",
    )
    columns = dict.fromkeys(column for own in known for column in own)
    lines = [
        [
            Cell(column.replace("_", " ")),
            *(_found(found[m.name], column) for m in methods),
        ]
        for column in columns
    ]
    section.blocks.append(Table(["", *(m.name for m in methods)], lines))
    return section


def _diagnosis(source: Source) -> dict[str, float]:
    """The numbers of a run's newest diagnosis, as means over its rows, by name."""
    if source.diagnosis is None:
        return {}
    rows = json.loads(source.diagnosis.read_text(encoding="utf-8"))["rows"]
    # A row for all heads together stands beside those of each head.
    rows = [row for row in rows if row.get("head") == ALL_HEADS] or rows
    numbers: dict[str, list[float]] = {}
    for row in rows:
        for column, value in row.items():
            bound = column.endswith(("_low", "_high")) and _stem(column) in row
            if isinstance(value, int | float) and not (
                bound or isinstance(value, bool)
            ):
                numbers.setdefault(column, []).append(float(value))
    return {column: float(np.mean(values)) for column, values in numbers.items()}


def _stem(column: str) -> str:
    return column.removesuffix("_low").removesuffix("_high")


def _found(seeds: Sequence[Mapping[str, float]], column: str) -> Cell:
    """The mean over the seeds that have a number."""
    values = [own[column] for own in seeds if column in own]
    if not values:
        return gap("no such number in the newest diagnosis.json, or none at all")
    each = ", ".join(map(number, values))
    title = f"diagnosis.json of {len(values)} of {len(seeds)} seeds: {each}"
    few = f"{len(values)} of {len(seeds)} seeds" if len(values) < len(seeds) else ""
    return Cell(number(float(np.mean(values))), title, small=few)


def gaps(methods: Sequence[Method], studies: Sequence[Study]) -> Section:
    """Build the list of what could not be measured, and why."""
    section = Section(
        "gaps", "What is missing", "Gaps in the tables, with their reasons."
    )
    notes = [
        f"{source.name}: {source.gap}"
        for method in methods
        for source in method.sources
        if source.gap
    ]
    for study in studies:
        for own in study.measured:
            reasons: dict[str, list[str]] = {}
            for condition, reason in own.gaps.items():
                labels = reasons.setdefault(reason, [])
                if condition.label not in labels:
                    labels.append(condition.label)
            notes += [
                f"{own.method.name}, {', '.join(labels)}: {reason}"
                for reason, labels in reasons.items()
            ]
    section.blocks = [Note(note, gap=True) for note in notes] or [Note("Nothing.")]
    return section


def origins(methods: Sequence[Method]) -> Section:
    """Build the table of runs and the evaluations that the numbers come from."""
    section = Section(
        "origins",
        "Where the numbers come from",
        "Pointing at a number anywhere on this page shows its runs, seeds and file.",
    )
    head = [
        *("run", "training seed", "configuration", "evaluation", "checkpoint"),
        *("episodes", "worlds' seed", "commit"),
    ]
    lines = [_line(method, source) for method in methods for source in method.sources]
    section.blocks.append(Table(head, lines))
    return section


def _line(method: Method, source: Source) -> list[Cell]:
    run = source.run
    about: Mapping[str, Any] = source.evaluation.about if source.evaluation else {}
    line = [
        Cell(source.name, str(run.path.resolve()), small=method.name),
        Cell(str(UNKNOWN if source.seed is None else source.seed)),
        Cell(
            run.config_digest,
            "SHA-256 of config.yaml, its first digits",
            small=f"marl_pool {run.version}",
        ),
    ]
    if source.evaluation is None:
        return [*line, *(gap(source.gap) for _ in range(5))]
    checkpoint, iteration = about["checkpoint"], about.get("iteration")
    at = "" if iteration in (None, checkpoint) else f"iteration {iteration}"
    return [
        *line,
        Cell(
            source.evaluation.path.name,
            str(source.evaluation.path.resolve()),
            small=f"{source.evaluation.written} UTC",
        ),
        Cell(str(checkpoint), small=at),
        Cell(str(about["episodes"])),
        Cell(str(about["seed"])),
        Cell(str(about.get("commit") or UNKNOWN)),
    ]
