"""Where every number comes from, and what is missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from marl_pool.evaluation.report.components import Cell, Note, Section, Table, gap
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.sources import Source
from marl_pool.evaluation.report.study import Measured, Study

UNKNOWN = "not recorded"


def recorded(about: Mapping[str, Any], key: str) -> str:
    """What an evaluation says of itself."""
    value = about.get(key)
    return UNKNOWN if value in (None, "") else str(value)


def gaps(methods: Sequence[Method], studies: Sequence[Study]) -> Section:
    """Build the list of what could not be measured, and why."""
    section = Section(
        "gaps", "What is missing", "Gaps in the tables, with their reasons."
    )
    notes = [
        f"{source.name}: {reason}"
        for method in methods
        for source in method.sources
        for reason in (source.gap, source.diagnosis_gap, source.metrics_gap)
        if reason
    ]
    for study in studies:
        notes += [
            f"{method.name}: {study.lacking(method)}"
            for method in methods
            if method.evaluated and study.lacking(method)
        ]
        for own in study.measured:
            reasons: dict[str, list[str]] = {}
            for condition, reason in own.gaps.items():
                labels = reasons.setdefault(reason, [])
                if study.named(condition) not in labels:
                    labels.append(study.named(condition))
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
        Cell(source.name, f"one of {len(method.sources)} runs", small=method.name),
        Cell(recorded(run.config, "seed"), f"seed in {source.name}/config.yaml"),
        Cell(
            run.config_digest,
            f"SHA-256 of {source.name}/config.yaml, its first digits",
            small=f"marl_pool {run.version}",
        ),
    ]
    if source.evaluation is None:
        return [*line, *(gap(source.gap) for _ in range(5))]
    checkpoint, iteration = about["checkpoint"], about.get("iteration")
    at = "" if iteration in (None, checkpoint) else f"iteration {iteration}"
    file = ", ".join(files(source))
    return [
        *line,
        Cell(
            source.evaluation.path.name, file, small=f"{source.evaluation.written} UTC"
        ),
        Cell(str(checkpoint), file, small=at),
        Cell(recorded(about, "episodes"), file),
        Cell(recorded(about, "seed"), file),
        Cell(recorded(about, "commit"), file),
    ]


def files(source: Source) -> list[str]:
    """The files of a run's evaluation, as they may be told to others."""
    if source.evaluation is None:
        return []
    paths = (source.evaluation.path, *source.evaluation.earlier)
    return [source.where(path) for path in paths]


def origin(measured: Sequence[Measured]) -> str:
    """Where numbers come from, for a title: seeds, episodes, commit and files."""
    texts = []
    for own in measured:
        evaluated = own.method.evaluated
        seeds = ", ".join(str(source.seed) for source in evaluated)
        abouts = [source.evaluation.about for source in evaluated if source.evaluation]
        episodes = abouts[0]["episodes"]
        commits = dict.fromkeys(recorded(about, "commit") for about in abouts)
        paths = ", ".join(path for source in evaluated for path in files(source))
        texts.append(
            f"{own.method.name}: training seeds {seeds}, {episodes} episodes each, "
            f"commit {', '.join(commits)}, {paths}"
        )
    return "; ".join(texts)
