"""The provenance of all numbers, and the reasons for missing values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.report.components import (
    Note,
    PageSection,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.runs import ReportedRun

if TYPE_CHECKING:
    from marl_pool.evaluation.report.group_scores import GroupScores, MethodScores

UNKNOWN = "not recorded"


def recorded(about: Mapping[str, Any], key: str) -> str:
    """A value that an evaluation recorded, as text."""
    value = about.get(key)
    return UNKNOWN if value in (None, "") else str(value)


def files_of(one: ReportedRun) -> str:
    """The files of a run's evaluation, without the folders above the run."""
    paths = one.evaluation.paths if one.evaluation else []
    return ", ".join(map(one.relative, paths))


def provenance_of(method: Method) -> str:
    """Seeds, episodes, commit and files of a method's numbers."""
    abouts = [one.evaluation.about for one in method.evaluated if one.evaluation]
    seeds = ", ".join(str(one.seed) for one in method.evaluated)
    commits = ", ".join(dict.fromkeys(recorded(about, "commit") for about in abouts))
    files = ", ".join(files_of(one) for one in method.evaluated)
    return (
        f"{method.name}: training seeds {seeds}, {abouts[0]['episodes']} episodes "
        f"each, commit {commits}, {files}"
    )


def joint_provenance(measured: "Sequence[MethodScores]") -> str:
    """The provenance of numbers that several methods share."""
    return "; ".join(own.provenance for own in measured)


def missing_values(
    methods: Sequence[Method], groups: "Sequence[GroupScores]"
) -> PageSection:
    """Build the list of missing values with their reasons."""
    notes = [
        *_of_runs(methods),
        *(note for one in groups for note in _of(one, methods)),
    ]
    section = PageSection("missing", [Note(note, missing=True) for note in notes])
    section.components += [] if notes else [Note("Nothing.")]
    return section


def _of_runs(methods: Sequence[Method]) -> Iterator[str]:
    for method in methods:
        for one in method.runs:
            for reason in (
                one.evaluation_missing,
                one.diagnosis_missing,
                one.metrics_missing,
            ):
                if reason:
                    yield f"{one.name}: {reason}"


def _of(group: "GroupScores", methods: Sequence[Method]) -> Iterator[str]:
    for method in methods:
        if method.evaluated and group.missing(method):
            yield f"{method.name}: {group.missing(method)}"
    for own in group.measured:
        labels: dict[str, dict[str, None]] = {}
        for condition, reason in own.missing.items():
            labels.setdefault(reason, {})[group.named(condition)] = None
        for reason, names in labels.items():
            yield f"{own.method.name}, {', '.join(names)}: {reason}"
